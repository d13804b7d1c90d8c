"""The ops as torch sees them: schemas, shape functions, gradients, `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_reference as reference
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import jetflow_triton as ops


def normal(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, requires_grad=grad)


def routed() -> tuple[Tensor, ...]:
    return (normal(3, 16), normal(8, 24, 16), normal(8, 16, 12), *ops.moe_route(normal(3, 8), 2, True))


ARGUMENTS: dict[str, Callable[[], tuple]] = {
    "rms_norm": lambda: (normal(3, 8, grad=True), normal(8, grad=True), 1e-5),
    "add_rms_norm": lambda: (normal(3, 8, grad=True), normal(3, 8, grad=True), normal(8, grad=True), 1e-5),
    "silu_mul": lambda: (normal(3, 8, grad=True),),
    "qk_norm_rope": lambda: (
        normal(3, 4, 8, grad=True),
        normal(3, 2, 8, grad=True),
        torch.tensor([1, 2, 3]),
        normal(9, 8),
        normal(8, grad=True),
        None,
        1e-5,
    ),
    "kv_write": lambda: (normal(3, 2, 8), normal(3, 2, 8), *normal(2, 4, 16, 2, 8), torch.tensor([1, -1, 40])),
    "kv_move": lambda: (normal(2, 2, 4, 16, 2, 8), torch.tensor([1, 2]), torch.tensor([2, 3])),
    "linear": lambda: (normal(3, 8), normal(4, 8), normal(4)),
    "topk_logprobs": lambda: (normal(3, 8), normal(20, 8), 4, 18),
    "sample": lambda: (
        normal(3, 30),
        torch.tensor([0.0, 1.0, 0.5]),
        torch.tensor([0, 0, 9]),
        torch.tensor([1.0, 0.9, 1.0]),
        torch.zeros(3),
        torch.tensor([1, 2, 3]),
        torch.tensor([4, 5, 6]),
    ),
    "accept_walk": lambda: (
        torch.tensor([5, 6, 7]),
        torch.tensor([-1, 0, 1]),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([6, 7, 8]),
        4,
    ),
    "distill_loss": lambda: (
        normal(4, 8, grad=True),
        normal(20, 8),
        normal(4, 6),
        normal(20, 6),
        None,
        None,
        torch.rand(4),
        "forward_kl",
        1.0,
        2.0,
        True,
    ),
    "moe_route": lambda: (normal(3, 8), 2, True),
    "moe_experts": routed,
    "tree_attention": lambda: reference.random_call([[-1, 0, 0], [-1]], [20, 3], window=9).args(),
    "tree_attention_exact": lambda: reference.random_call([[-1, 0, 0], [-1]], [20, 3]).args()[:8],
}


def test_every_public_op_is_registered() -> None:
    assert set(ARGUMENTS) == set(ops.__all__) - {"debug_checks"}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # opcheck itself reads it
@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name: str) -> None:
    opcheck(getattr(torch.ops.jetflow, name).default, ARGUMENTS[name]())


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_mul", "qk_norm_rope"])
def test_registered_gradients_equal_the_twins(name: str) -> None:
    torch.manual_seed(0)
    args = ARGUMENTS[name]()
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]

    def gradients(op: Callable[..., Tensor | tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        results = op(*args)
        results = (results,) if isinstance(results, Tensor) else results
        loss = sum((part.sin() * torch.arange(part.numel()).view(part.shape)).sum() for part in results)
        return torch.autograd.grad(loss, wanted)

    registered = gradients(getattr(torch.ops.jetflow, name).default)
    for result, expected in zip(registered, gradients(getattr(ops, name)), strict=True):
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_mul", "qk_norm_rope"])
@pytest.mark.parametrize("registered", [True, False])
def test_gradcheck(name: str, registered: bool) -> None:
    """Both the registered op's formula and the twin's own autograd, in float64."""
    args = [
        arg.detach().double().requires_grad_() if isinstance(arg, Tensor) and arg.requires_grad else arg
        for arg in ARGUMENTS[name]()
    ]
    op = getattr(torch.ops.jetflow, name).default if registered else getattr(ops, name)
    assert torch.autograd.gradcheck(op, args)


def test_compile_traces_through() -> None:
    def layer(q: Tensor, *rest: Any) -> Tensor:
        return ops.rms_norm(ops.tree_attention(q * 2, *rest), torch.ones(16), 1e-5)

    args = ARGUMENTS["tree_attention"]()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), layer(*args))
