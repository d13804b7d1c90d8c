"""The examples in the docstrings run and give what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch


@pytest.mark.parametrize("name", ["choice", "distill", "exact_attention", "linear", "logprobs"])
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(f"jetflow_triton.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
