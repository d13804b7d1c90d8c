"""The committed table of what each compiled kernel needs: measured, written, read.

uv run python tests/triton/kernel_resources.py     # compiles everything and writes RESOURCES.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import kernel_configurations
import triton
import vocabulary_configurations
from kernel_offline import TARGETS, Compiled, compile_launches, inspect_kernel

TABLE = Path(__file__).parents[2] / "packages" / "jetflow-triton" / "RESOURCES.md"
CONFIGURATIONS: dict[str, Callable[[], object]] = {
    **kernel_configurations.CONFIGURATIONS,
    **vocabulary_configurations.CONFIGURATIONS,
}
PRODUCTS = kernel_configurations.PRODUCTS | vocabulary_configurations.PRODUCTS
"""Kernels that must multiply on the tensor cores (but for float32, whose products are exact)."""

SPILLS = {"32 trees, 8B": 16, "chain, width 256": 128, "tree, 8B, fp32": 64}
"""Bytes that a launch may spill on NVIDIA: where splits merge in registers a tile has two sums at once. Others spill nothing."""

AMD_SPILLS = 256
"""Its compiler has half the registers for a program of 8 wavefronts."""

HEAD = f"""# What the compiled kernels need

Compiled offline by Triton {triton.__version__} at the shapes of Qwen3-8B and Qwen3-30B-A3B, bfloat16 where nothing else
is said, by `uv run python tests/triton/kernel_resources.py`; the tests hold the compiler to these numbers. Each cell:
shared memory in bytes / registers a thread / spilled bytes a thread, and the tensor-core instruction.

| launch | kernel | {" | ".join(TARGETS)} |
|---|---|{"---|" * len(TARGETS)}
"""


def measure(name: str, target: str) -> list[Compiled]:
    """The kernels of one configuration, compiled for one target."""
    return [inspect_kernel(kernel) for kernel in compile_launches(target, CONFIGURATIONS[name])]


def lines(table: Mapping[str, list[dict[str, Compiled]]]) -> Iterator[str]:
    """The rows of the table: a kernel a line, by target; what an earlier configuration needs too is left out."""
    seen: set[tuple[Compiled, ...]] = set()
    for name, kernels in table.items():
        for by_target in kernels:
            needs = tuple(by_target[target] for target in TARGETS)
            if needs not in seen:
                yield f"| {name} | `{needs[0].kernel}` | {' | '.join(map(_cell, needs))} |"
            seen.add(needs)


def read() -> dict[str, list[tuple[str, Compiled]]]:
    """The table by target: configurations and what their kernels need."""
    table: dict[str, list[tuple[str, Compiled]]] = {target: [] for target in TARGETS}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) == 2 + len(TARGETS) and cells[1].startswith("`"):
            kernel = cells[1].strip("`")
            for target, cell in zip(TARGETS, cells[2:], strict=True):
                shared, registers, rest = cell.split(" / ")
                spills, _, products = rest.partition(" ")
                needs = Compiled(kernel, int(shared), int(registers), int(spills), products)
                table[target].append((cells[0], needs))
    return table


def _cell(needs: Compiled) -> str:
    return f"{needs.shared} / {needs.registers} / {needs.spills} {needs.products}".strip()


def main() -> None:
    """Compiles everything and writes the table."""
    table: dict[str, list[dict[str, Compiled]]] = {}
    for name in CONFIGURATIONS:
        columns = [measure(name, target) for target in TARGETS]
        table[name] = [dict(zip(TARGETS, kernels, strict=True)) for kernels in zip(*columns, strict=True)]
        sys.stderr.write(f"{name}: {len(table[name])} kernels\n")
    TABLE.write_text(HEAD + "\n".join(lines(table)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
