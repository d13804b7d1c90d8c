"""Every example of the package's README runs by itself, and every op has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import jetflow_triton

README = (Path(jetflow_triton.__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^### (.+?)\n.*?```python\n(.*?)```", README, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("title", EXAMPLES)
def test_example_runs(title: str) -> None:
    torch.manual_seed(0)
    exec(EXAMPLES[title], {})


def test_each_section_has_one_short_example() -> None:
    assert README.count("```python") == len(EXAMPLES)
    for title, code in EXAMPLES.items():
        assert len(code.splitlines()) <= 18, title


@pytest.mark.parametrize("name", jetflow_triton.__all__)
def test_every_public_name_is_shown(name: str) -> None:
    assert any(f"ops.{name}(" in code for code in EXAMPLES.values())


def test_every_op_is_listed() -> None:
    contents = README[README.index("| op | does |") : README.index("## Examples")]
    for name in set(jetflow_triton.__all__) - {"debug_checks"}:
        assert f"`{name}`" in contents, name
    for anchor in re.findall(r"\]\(#([a-z_-]+)\)", contents):
        assert anchor in {title.replace(" ", "-") for title in EXAMPLES}


def test_links_and_commands_exist() -> None:
    root = Path(jetflow_triton.__file__).parents[4]
    for path in ("scripts/gpu_check.py", "docs/roofline.md"):
        assert path in README
        assert (root / path).is_file(), path
    for module in re.findall(r"python -m jetflow_triton\.(\w+)", README):
        found = Path(jetflow_triton.__file__).parent / module
        assert found.with_suffix(".py").is_file() or (found / "__main__.py").is_file(), module
