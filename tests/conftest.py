"""Every test draws the same numbers in every run, alone or among others."""

import pytest
import torch

# The tensors are tiny, so threads would only wait for each other; and child processes of one thread must give the same bits.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-minutes", type=float, default=1.0, help="how long the soak test keeps a server busy (%(default)s)"
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
