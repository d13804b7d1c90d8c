"""Where triton has no wheel the package imports, its twins run, and a GPU tensor gives a clear error."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import jetflow_triton

PACKAGE = Path(jetflow_triton.__file__).parents[2]

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # every import of it now raises ModuleNotFoundError, as where it is not installed
import re
from pathlib import Path
import torch
import jetflow_triton as ops
from jetflow_triton import dispatch, tune

code = re.findall(r"```python\\n(.*?)```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.DOTALL)
for block in code:
    exec(block, {"torch": torch, "ops": ops})
try:
    dispatch._Lazy("norm.rms_norm")(torch.ones(2, 2), torch.ones(2), 1e-6)
except ImportError as error:
    assert "need the package triton" in str(error), error
else:
    raise AssertionError("a kernel ran without triton")
assert tune.main([]) == 2
print(len(code), "examples")
"""


def test_everything_but_the_kernels_works_without_triton() -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON, str(PACKAGE / "README.md")]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout.split()[0]) > 0


def test_triton_is_required_where_it_has_wheels_only() -> None:
    with (PACKAGE / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    (triton,) = [needed for needed in dependencies if needed.startswith("triton")]
    assert triton.endswith("; sys_platform == 'linux'")
