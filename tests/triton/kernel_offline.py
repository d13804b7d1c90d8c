"""Compiles what a launcher would launch, for a GPU that is not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Compiled:
    """What one launch needs from the device."""

    name: str
    shared: int
    registers: int
    spills: int
    tensor_cores: bool


class _Device:
    """As much of a driver as the compiler asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_launches(
    monkeypatch: pytest.MonkeyPatch, capability: int, launch: Callable[[], object]
) -> list[triton.compiler.CompiledKernel]:
    """Runs `launch` (on meta tensors) and compiles, instead of starting, each kernel it launches."""
    kernels: list[triton.compiler.CompiledKernel] = []
    run = JITFunction.run

    def record(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        del warmup
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        previous = driver._active if hasattr(driver, "_active") else None
        driver.set_active(_Device(capability))
        try:
            launch()
        finally:
            driver.set_active(previous)
    return kernels


def inspect_kernel(kernel: triton.compiler.CompiledKernel) -> Compiled:
    """Shared memory from the metadata, registers and local memory from the cubin."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [tools / "cuobjdump", "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers = re.search(r"REG:(\d+)", text)
    local = re.search(r"LOCAL:(\d+)", text)
    stack = re.search(r"STACK:(\d+)", text)
    assert registers, text
    assert local, text
    assert stack, text
    tensor_cores = re.search(r"mma\.sync|wgmma|tcgen05\.mma", kernel.asm["ptx"]) is not None
    return Compiled(
        kernel.metadata.name,
        kernel.metadata.shared,
        int(registers[1]),
        int(local[1]) + int(stack[1]),
        tensor_cores,
    )
