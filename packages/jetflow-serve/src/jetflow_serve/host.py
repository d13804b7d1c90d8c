"""What a measurement was made on: a speed-up without its hardware, dtype and versions says nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from jetflow_core.layers import has_native_bfloat16

if TYPE_CHECKING:
    from jetflow_core.llm import LLM

CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = ("jetflow-serve", "jetflow-core", "jetflow-triton", "torch")


def describe(llm: LLM) -> dict[str, str | int | bool]:
    """Hardware, dtype and versions behind `llm`'s numbers, in print order."""
    info = _cpu_info()
    facts: dict[str, str | int | bool] = {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cores": os.cpu_count() or 1,
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "native_bf16": has_native_bfloat16(),
    }
    if llm.engine.device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(llm.engine.device)
    facts["device"] = str(llm.engine.device)
    facts["dtype"] = str(llm.engine.model.embed.dtype).removeprefix("torch.")
    facts["exact"] = llm.engine.model.exact
    facts["python"] = platform.python_version()
    return facts | {name: importlib.metadata.version(name) for name in PACKAGES}


def _cpu_info() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    if not CPU_INFO.exists():
        return {}
    first = CPU_INFO.read_text().split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}
