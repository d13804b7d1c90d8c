"""The package's README runs, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jetflow_triton


def test_readme_runs() -> None:
    readme = Path(jetflow_triton.__file__).parents[2] / "README.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL))
    for name in jetflow_triton.__all__:
        assert f"ops.{name}(" in code, f"{name} has no example"
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["out"].shape == (5, 64)
