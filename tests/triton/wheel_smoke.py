"""Runs in an environment that has the wheel installed, and not the workspace: `examples`, or `kernels` as interpreted."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import torch

import jetflow_triton as ops
from jetflow_triton.roofline.sheet import markdown


def examples() -> None:
    """Every example of the README, as the wheel's metadata carries it."""
    readme = importlib.metadata.metadata("jetflow-triton").get_payload()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    for block in blocks:
        exec(block, {})
    assert "# Roofline of the ops" in markdown(), "the sheet needs the tile table"
    sys.stdout.write(f"{len(blocks)} examples")


def kernels() -> None:
    """The kernels themselves, on CPU tensors, against what the ops give there."""
    from jetflow_triton.kernels import attention, moe, norm

    torch.manual_seed(0)
    x, weight = torch.randn(3, 40), torch.rand(40)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6))
    q, cache = torch.randn(3, 2, 16), torch.randn(2, 3, 16, 1, 16)
    tables, mask = torch.tensor([[2, 1]]).int(), torch.tensor([[1], [3], [5]]).int()
    tree = (q, *cache, tables, torch.tensor([0, 3]).int(), torch.tensor([20]).int(), mask, 0.25)
    torch.testing.assert_close(attention.tree_attention(*tree), ops.tree_attention(*tree))
    routed = (x, torch.randn(4, 2 * 24, 40) / 6, torch.randn(4, 40, 24) / 5, *ops.moe_route(torch.randn(3, 4), 2, True))
    torch.testing.assert_close(moe.moe_experts(*routed), ops.moe_experts(*routed))
    sys.stdout.write("3 kernels")


if __name__ == "__main__":
    assert Path(ops.__file__).is_relative_to(sys.prefix), f"{ops.__file__} is not the installed wheel"
    assert importlib.util.find_spec("jetflow_core") is None, "the workspace can be imported here"
    torch.set_num_threads(1)
    {"examples": examples, "kernels": kernels}[sys.argv[1]]()
