"""Runs the kernels under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-rN", str(Path(__file__).with_name("kernels_interpreted.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    finished = subprocess.run([*command, *options], check=False, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
    return finished.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="triton has no wheel here")
def test_kernels_under_the_interpreter() -> None:
    assert " passed" in _run()


@pytest.mark.slow
def test_two_hundred_trees_under_the_interpreter() -> None:
    assert "198 passed" in _run("-m", "slow")
