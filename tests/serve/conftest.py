"""A server that a test starts in its process sets up logging: every test leaves it as it was."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("jetflow_serve")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])
