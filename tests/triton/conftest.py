"""Makes the folder's helper modules importable, runs files under Triton's interpreter, counts the tests by kind."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts")]  # helpers, and the GPU check under test


@pytest.fixture
def interpret(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Runs a file's tests in a process where `TRITON_INTERPRET` is set, which Triton reads when it is imported.

    The number of tests that passed there is recorded as the calling test's `interpreted`.
    """

    def run(*options: str) -> None:
        command = [sys.executable, "-m", "pytest", "-rN", "-p", "no:cacheprovider", *options]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        finished = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment, cwd=HERE.parents[1]
        )
        assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
        passed = re.search(r"(\d+) passed", finished.stdout)
        assert passed, finished.stdout[-2000:]
        record_property("interpreted", int(passed[1]))

    return run


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.dot` of the interpreter adds up each element in the order of K, whatever the tile's shape.

    It calls the host's BLAS, which picks another order for other shapes on some CPUs. With this, equal bits say what they are
    meant to: that the kernel itself takes K in one order.
    """
    from triton.runtime import interpreter

    def create_dot(self: object, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
        left, right = (each.data.astype(d.data.dtype) for each in (a, b))
        product = (left[..., :, :, None] * right[..., None, :, :]).sum(-2)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tests of this folder that passed, by kind; those of child processes by their own number."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        path = config.rootpath / report.nodeid.split("::")[0]
        if report.when == "call" and path.parent == HERE:
            properties = dict(report.user_properties)
            counts["interpreted"] += properties.get("interpreted", "interpreted" in path.name)
            counts["compiled"] += path.name == "test_compile.py"
            counts["kernels"] += properties.get("kernels", 0)
            counts["twin"] += not (
                "interpreted" in properties or "interpreted" in path.name or path.name == "test_compile.py"
            )
    if counts:
        terminalreporter.write_line(
            f"tests/triton: {counts['twin']} tests of twins and contracts, {counts['interpreted']} of kernels under the "
            f"interpreter, {counts['compiled']} of compiled code ({counts['kernels']} kernels compiled)"
        )
