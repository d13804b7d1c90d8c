"""Runs the kernels under Triton's interpreter, in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("*_interpreted.py"))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton has no wheel here")


@pytest.mark.parametrize("file", FILES)
def test_kernels_under_the_interpreter(file: str, interpret: Callable[..., None]) -> None:
    interpret(str(HERE / file))
