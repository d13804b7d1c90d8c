"""The package as others get it: built, and installed where torch and triton are and this workspace is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import torch

import jetflow_triton

SOURCE = Path(jetflow_triton.__file__).parent
UV = os.environ.get("UV") or shutil.which("uv") or ""
pytestmark = pytest.mark.skipif(not UV, reason="uv builds and installs the wheel")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON", "VIRTUAL"))}
    finished = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=cwd, env=clean | environment, timeout=300
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = (UV, "build", "--package", "jetflow-triton", "--out-dir", out)
    try:  # `uv sync` has fetched the build backend, so this needs no network
        run(*command, "--offline", cwd=SOURCE)
    except AssertionError:  # unless its cache was cleared since
        run(*command, cwd=SOURCE)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def sources() -> set[str]:
    """What the package consists of: every file of its folder but the compiled ones."""
    return {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == "jetflow_triton-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "jetflow_triton/py.typed" in names
    information = {name for name in names if name.startswith("jetflow_triton-0.1.0.dist-info/")}
    assert names - information == sources()
    assert "jetflow_triton-0.1.0.dist-info/licenses/LICENSE" in information


def test_source_archive_holds_no_tests(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.removeprefix("jetflow_triton-0.1.0/") for name in archive.getnames()}
    assert {"src/" + name for name in sources()} | {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not any("test" in Path(name).parts[0] for name in names)


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "jetflow-triton"
    assert metadata["Version"] == "0.1.0"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    torch_needed, triton_needed = metadata.get_all("Requires-Dist", [])
    assert torch_needed.startswith("torch>=")
    assert triton_needed.startswith("triton>=")
    assert triton_needed.endswith("; sys_platform == 'linux'")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "```python" in metadata.get_payload()


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what is installed here, torch and triton among it.

    A `.pth` file adds the folder of installed packages; the `.pth` files in that folder, which are what makes the
    workspace importable, are not read.
    """
    home = tmp_path_factory.mktemp("elsewhere")
    venv.create(home / "venv", symlinks=sys.platform != "win32")
    (python,) = [path for path in (home / "venv").glob("*/python*") if path.stem == "python"]
    run(UV, "pip", "install", "--offline", "--no-deps", "--python", python, wheel, cwd=home)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-I", "-c", where, cwd=home).strip())
    (site / "shared.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    return python


def smoke(python: Path, part: str, **environment: str) -> str:
    return run(python, "-I", Path(__file__).with_name("wheel_smoke.py"), part, cwd=python.parent, **environment)


def test_installed_wheel_runs_every_example(python: Path, metadata: Message) -> None:
    count = metadata.get_payload().count("```python")
    assert smoke(python, "examples").strip() == f"{count} examples"


def test_installed_wheel_runs_kernels_under_the_interpreter(python: Path) -> None:
    pytest.importorskip("triton", reason="no wheel on this platform")
    assert smoke(python, "kernels", TRITON_INTERPRET="1").strip() == "3 kernels"
