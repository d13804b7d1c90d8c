"""What is launched: nothing that waits for the GPU, nothing new for a new length, and code held to the committed table.

Kernels are compiled for GPUs that are not there. Every change compiles a part of the table, `-m slow` all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
import triton

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under the interpreter", allow_module_level=True)

import kernel_resources as resources
from kernel_configurations import exact_tree, experts, meta, rows, tree
from kernel_offline import SHARED, TARGETS, Compiled, compile_launches, launch_keys
from vocabulary_configurations import choices, linear, topk

QUICK = {("rows, bf16", "sm_90"), ("experts, 1 token", "sm_90"), *(("tree, 8B", target) for target in TARGETS)}
ALL = [(name, target) for name in resources.CONFIGURATIONS for target in TARGETS]
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}

committed = cache(resources.read)


@pytest.mark.parametrize(
    ("name", "target"), [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in ALL]
)
def test_needs_what_the_table_says(name: str, target: str, record_property: Callable[[str, object], None]) -> None:
    if f"Triton {triton.__version__} " not in resources.TABLE.read_text(encoding="utf-8"):
        pytest.skip("the table was made by another version of Triton")
    kernels = resources.measure(name, target)
    assert kernels
    record_property("kernels", len(kernels))
    allowed = {needs for _, needs in committed()[target]}
    for kernel in kernels:
        assert kernel in allowed, f"{resources.TABLE.name} is out of date for {name}"


@pytest.mark.parametrize("target", TARGETS)
def test_the_table_is_within_the_hardware(target: str) -> None:
    """Shared memory fits, the kernels of a step spill nothing, and products are on the tensor cores."""
    assert {name for name, _ in committed()[target]} >= {"rows, bf16", "tree, 8B", "experts, 1 token"}
    amd = target == "gfx942"
    for name, needs in committed()[target]:
        assert needs.shared <= SHARED[target], (name, needs)
        assert needs.spills <= (resources.AMD_SPILLS if amd else resources.SPILLS.get(name, 0)), (name, needs)
        multiplies = needs.kernel in resources.PRODUCTS and (amd or "fp32" not in name)  # AMD's are exact in float32
        assert bool(needs.products) == multiplies, (name, needs)


def test_experts_use_one_instruction_at_every_number_of_tokens() -> None:
    """Another instruction may add up a row in another order, and its bits would change with the batch."""
    for target in ("sm_80", "sm_90", "sm_100"):
        found = {needs.products for name, needs in committed()[target] if "experts" in name}
        assert found == {"mma.sync", ""}, target


def test_rows_are_read_16_bytes_at_a_time() -> None:
    """A stride that the compiler knows nothing about would turn wide loads into single elements."""
    for kernel in compile_launches("sm_90", rows):
        if kernel.metadata.name != "moe_route_kernel":  # 128 logits are 4 a lane
            assert "ld.global.v4.b32" in kernel.asm["ptx"], kernel.metadata.name
            assert not re.search(r"ld\.global\.b(8|16)\b", kernel.asm["ptx"]), kernel.metadata.name


def new_kernels(launches: Iterable[Callable[[], object]]) -> dict[str, int]:
    """How many versions of each kernel all the launches need."""
    keys = {key for launch in launches for key in launch_keys(launch)}
    return {name: sum(key[0] == name for key in keys) for name in sorted({name for name, _ in keys})}


LENGTHS = [1, 2, 3, 7, 16, 17, 64, 100, 255, 256, 512, 1000, 4096]


def test_a_new_length_compiles_nothing_new() -> None:
    assert new_kernels(lambda n=n: rows(tokens=n) for n in LENGTHS) == new_kernels([rows])


def test_a_new_tree_or_prefix_compiles_nothing_new() -> None:
    """Two ways to merge splits; whatever the nodes, mask words, context and alignment of the index tensors."""
    sizes = [(n, max(1, n // 32), context) for n in LENGTHS for context in (16, 512, 528, 4096, 32768)]
    found = new_kernels(lambda s=s: tree(s[0], words=s[1], context=s[2], misplaced=s[0] % 2 == 1) for s in sizes)
    assert found == {"merge_splits_kernel": 1, "tree_attention_kernel": 2}


def test_a_new_exact_tree_compiles_nothing_new() -> None:
    """Chains run the kernel of trees, too."""
    found = new_kernels(lambda n=n: exact_tree(n, words=n // 64, context=16 * n) for n in LENGTHS)
    assert found == {"tree_attention_exact_kernel": 1}


@pytest.mark.parametrize(
    "launch",
    [lambda n: linear(n, 4096, 6144), lambda n: topk(n, 32), lambda n: choices(n, 33)],
    ids=["linear", "topk", "choice"],
)
def test_a_new_number_of_rows_compiles_nothing_new(launch: Callable[[int], object]) -> None:
    assert new_kernels(lambda n=n: launch(n) for n in LENGTHS) == new_kernels([lambda: launch(64)])


def test_a_new_batch_compiles_one_kernel_a_power_of_two() -> None:
    found = new_kernels(lambda n=n: tree(4 * n, batch=n, context=512) for n in range(1, 65))
    assert found == {"tree_attention_kernel": 7}


def test_a_new_window_compiles_nothing_new() -> None:
    found = new_kernels(lambda n=n: tree(64, context=512, window=n) for n in (1, 16, 1000, 4096))
    assert found == {"tree_attention_kernel": 1}


def test_experts_have_a_kernel_a_tile() -> None:
    found = new_kernels(lambda n=n: experts(n) for n in LENGTHS)
    assert found == {"combine_kernel": 1, "down_kernel": 3, "gate_up_kernel": 3, "sort_pairs_kernel": 1}


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", resources.CONFIGURATIONS)
def test_a_launch_reads_no_value_of_a_tensor(name: str) -> None:
    """Launchers run on tensors without values: what would wait for a GPU raises here."""
    with _Operations() as operations:
        assert launch_keys(resources.CONFIGURATIONS[name])
    assert not operations.seen & WAITS


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, bool, torch.nonzero])
def test_reading_a_value_would_be_noticed(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(meta(1))


def test_resources_of_a_kernel_are_read_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {target: Compiled("some_kernel", 10, 20, 0, "mma.sync") for target in TARGETS}
    monkeypatch.setattr(resources, "TABLE", tmp_path / "table.md")
    resources.TABLE.write_text("\n".join(resources.lines({"a, b": [kernels]})), encoding="utf-8")
    assert resources.read() == {target: [("a, b", needs)] for target, needs in kernels.items()}
