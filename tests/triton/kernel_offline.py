"""Compiles what a launcher would launch, for a GPU that is not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that a program may have."""

PRODUCTS = {"sm": r"mma\.sync|wgmma|tcgen05\.mma", "gfx": "mfma"}
"""Tensor-core instructions, as the assembler of each vendor spells them."""


@dataclass(frozen=True)
class Compiled:
    """What one kernel needs from the device."""

    kernel: str
    shared: int  # bytes
    registers: int  # a thread
    spills: int  # bytes of local memory a thread
    products: str  # the tensor-core instructions it issues


class _Device:
    """As much of a driver as the compiler asks for. Its number keeps each target's kernels apart."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.name)

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def _no_launch(target: str, instead: Callable[..., object]) -> Iterator[None]:
    run, previous = JITFunction.run, driver._active
    JITFunction.run = instead
    driver.set_active(_Device(target))
    try:
        yield
    finally:
        JITFunction.run = run
        driver.set_active(previous)


def compile_launches(target: str, launch: Callable[[], object]) -> list[CompiledKernel]:
    """Runs `launch` (on meta tensors) and compiles, instead of starting, each kernel it launches."""
    kernels: dict[str, CompiledKernel] = {}
    run = JITFunction.run

    def record(self: JITFunction, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        del warmup
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels[kernel.hash] = kernel

    with _no_launch(target, record):
        launch()
    return list(kernels.values())


def launch_keys(launch: Callable[[], object], target: str = "sm_90") -> list[tuple[str, str]]:
    """Name and cache key of each kernel that `launch` would start: a new key is a new compilation."""
    keys: list[tuple[str, str]] = []

    def record(self: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        assert all(isinstance(size, int) and size > 0 for size in grid), grid
        assert not warmup
        kwargs["debug"] = False
        _, _, _, _, binder = self.device_caches[driver.active.get_current_device()]
        _, specialization, options = binder(*args, **kwargs)
        keys.append((self.fn.__name__, compute_cache_key({}, specialization, options)))

    with _no_launch(target, record):
        launch()
    return keys


def inspect_kernel(kernel: CompiledKernel) -> Compiled:
    """Shared memory from the metadata, registers and local memory from the binary."""
    if "cubin" in kernel.asm:
        registers, spills = _cuda_usage(kernel.asm["cubin"])
        text, pattern = kernel.asm["ptx"], PRODUCTS["sm"]
    else:
        text, pattern = kernel.asm["amdgcn"], PRODUCTS["gfx"]
        registers, scratch = (
            int(re.findall(rf"\.{field}:\s*(\d+)", text)[-1]) for field in ("vgpr_count", "private_segment_fixed_size")
        )
        spills = scratch
    products = sorted(set(re.findall(pattern, text)))
    return Compiled(kernel.metadata.name, kernel.metadata.shared, registers, spills, " ".join(products))


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, local, stack = (re.search(rf"{field}:(\d+)", text) for field in ("REG", "LOCAL", "STACK"))
    assert registers, text
    assert local, text
    assert stack, text
    return int(registers[1]), int(local[1]) + int(stack[1])
