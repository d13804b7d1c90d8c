"""Every test draws the same numbers in every run, alone or among others."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
