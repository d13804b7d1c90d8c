"""What a measurement was made on: a speed-up without its hardware, dtype and versions says nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from jetflow_core.layers import has_native_bfloat16

CPU_INFO = Path("/proc/cpuinfo")


def describe(device: torch.device, dtype: torch.dtype, packages: Sequence[str]) -> dict[str, str | int | bool]:
    """Hardware, dtype of the target's weights and versions of `packages` behind a measurement, in print order."""
    info = _cpu_info()
    facts: dict[str, str | int | bool] = {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cores": os.cpu_count() or 1,
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "native_bf16": has_native_bfloat16(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    facts["device"] = str(device)
    facts["dtype"] = str(dtype).removeprefix("torch.")
    facts["python"] = platform.python_version()
    return facts | {name: importlib.metadata.version(name) for name in packages}


def _cpu_info() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    if not CPU_INFO.exists():
        return {}
    first = CPU_INFO.read_text().split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}
