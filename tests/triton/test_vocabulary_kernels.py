"""Runs the kernels between a hidden state and a token under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="triton has no wheel here")
def test_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-rN", str(Path(__file__).with_name("vocabulary_interpreted.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
    assert " passed" in finished.stdout
