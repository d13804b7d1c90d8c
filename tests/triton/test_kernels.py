"""Runs the kernels under Triton's interpreter, in a process of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FILES = sorted(str(path) for path in Path(__file__).parent.glob("*_interpreted.py"))


@pytest.mark.skipif(sys.platform != "linux", reason="triton has no wheel here")
def test_kernels_under_the_interpreter(interpret: Callable[..., None]) -> None:
    assert FILES
    interpret(*FILES)
