"""The twins of sampling and of the acceptance walk: distributions, filters, reproducibility, random trees."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetflow_triton import accept_walk, sample
from jetflow_triton import choice as module

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """A token a row, each row at a position of its own."""
    rows = len(logits)
    columns = (torch.full((rows,), value) for value in (temperature, top_k, top_p, min_p))
    return sample(logits, *columns, torch.full((rows,), 11), torch.arange(rows))


def frequencies(logits: Tensor, draws: int = 20000, **filters: float) -> Tensor:
    tokens = draw(logits.expand(draws, -1), **filters)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_from_the_softmax(dtype: torch.dtype) -> None:
    logits = torch.tensor([[2.0, 0.5, -1.0, 0.5, -torch.inf, 1.0]]).to(dtype)
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits[0].float() / temperature, -1)
        torch.testing.assert_close(frequencies(logits, temperature=temperature), expected, atol=0.012, rtol=0)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [0, 1, 3]),  # both that equal the second
        ({"top_p": 0.62}, [0]),
        ({"top_p": 0.65}, [0, 1, 3]),
        ({"min_p": 0.3}, [0]),
        ({"min_p": 0.2}, [0, 1, 3]),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.01}, [0, 1, 3]),
    ],
)
def test_filters(filters: dict[str, float], kept: list[int]) -> None:
    """Probabilities 0.628, 0.140, 0.031, 0.140, 0, 0.031, 0.031."""
    logits = torch.tensor([[3.0, 1.5, 0.0, 1.5, -torch.inf, 0.0, 0.0]])
    found = frequencies(logits, **filters)
    assert found.nonzero().squeeze(1).tolist() == kept
    torch.testing.assert_close(found[kept], torch.softmax(logits[0, kept], -1), atol=0.012, rtol=0)


def test_greedy_takes_the_first_of_equals() -> None:
    assert draw(torch.tensor([[0.0, 5.0, 5.0, 1.0]]), temperature=0.0).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_choice(temperature: float) -> None:
    logits = torch.zeros(4, 5)
    logits[0, 2], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf
    tokens = draw(logits, temperature=temperature).tolist()
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] >= 0


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e30, 3e38])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.randn(50, 20) * 1e4
    tokens = draw(logits, temperature=temperature)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 20
    if temperature < 1:
        assert torch.equal(tokens, logits.argmax(-1))


def test_a_row_is_a_function_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocab = 30, 2000
    args = (
        torch.randn(rows, vocab) * 3,
        torch.rand(rows) * (torch.arange(rows) % 3 > 0),
        torch.randint(0, 50, (rows,)) * (torch.arange(rows) % 2),
        1 - torch.rand(rows).double() * (torch.arange(rows) % 5 > 1),
        torch.rand(rows) * 0.1 * (torch.arange(rows) % 4 > 1),
        torch.randint(-(2**63), 2**63 - 1, (rows,)),
        torch.randint(0, 1000, (rows,)),
    )
    together = sample(*args)
    for i in range(rows):
        assert sample(*(arg[i : i + 1] for arg in args)).item() == together[i]
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 7 * vocab)
    monkeypatch.setattr(module, "_NUCLEUS_HEAD", 16)
    order = torch.randperm(rows)
    assert torch.equal(sample(*(arg[order] for arg in args)), together[order])


def walk_by_hand(tokens: list[int], parents: list[int], choices: list[int], depth: int) -> tuple[list[int], int]:
    path = [0]
    while len(path) <= depth:
        wanted = choices[path[-1]]
        children = [i for i, parent in enumerate(parents) if parent == path[-1] and tokens[i] == wanted]
        if not children:
            break
        path.append(children[0])
    return path, choices[path[-1]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 14), max_size=5), st.integers(0, 6), st.integers(0, 10**6))
def test_accept_walk_follows_the_choices(sizes: list[int], depth: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    trees = [reference.random_parents(size, generator) if size else [] for size in sizes]
    tokens, choices = [], []
    for parents in trees:
        ranks = [parents[:i].count(parent) for i, parent in enumerate(parents)]  # siblings differ, cousins may not
        tokens.append([3 + rank for rank in ranks])
        choices.append((torch.randint(-1, 5, (len(parents),), generator=generator).clamp_min(0) + 2).tolist())
    flat = [torch.tensor([i for part in parts for i in part], dtype=torch.int64) for parts in (tokens, trees, choices)]
    starts = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).to(torch.int32)
    path, lengths, bonus = accept_walk(flat[0], flat[1], starts, flat[2], depth)
    assert path.shape == (len(sizes), depth + 1)
    for b, parents in enumerate(trees):
        expected, token = walk_by_hand(tokens[b], parents, choices[b], depth) if parents else ([], -1)
        assert path[b].tolist() == expected + [-1] * (depth + 1 - len(expected))
        assert (int(lengths[b]), int(bonus[b])) == (len(expected), token)


ROWS = torch.zeros(3)
SAMPLE = dict.fromkeys(("temperature", "top_p", "min_p"), ROWS) | dict.fromkeys(
    ("top_k", "seeds", "positions"), ROWS.long()
)
WALK = dict.fromkeys(("tokens", "parents", "choices"), ROWS.long())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"logits": torch.zeros(3, 8).long()}, TypeError, "logits is torch.int64"),
        ({"logits": torch.zeros(8, 3).T}, ValueError, "logits needs a contiguous last dimension"),
        ({"temperature": ROWS.long()}, TypeError, "temperature is torch.int64"),
        ({"top_k": ROWS}, TypeError, "top_k is torch.float32"),
        ({"top_p": torch.zeros(2)}, ValueError, "top_p has shape"),
        ({"min_p": torch.zeros(3, 1)}, ValueError, "min_p has shape"),
        ({"seeds": ROWS.int()}, TypeError, "seeds is torch.int32"),
        ({"positions": ROWS.long()[:2]}, ValueError, "positions has shape"),
        ({"seeds": torch.zeros(3, dtype=torch.int64, device="meta")}, ValueError, "seeds is on meta"),
    ],
)
def test_wrong_argument_of_sample(changed: dict[str, Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sample(**({"logits": torch.zeros(3, 8)} | SAMPLE | changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"tokens": ROWS}, TypeError, "tokens is torch.float32"),
        ({"parents": ROWS.long()[:2]}, ValueError, "parents has 2 entries"),
        ({"choices": ROWS.int()}, TypeError, "choices is torch.int32"),
        ({"choices": ROWS.long()[:1]}, ValueError, "choices has 1 entries"),
        ({"query_start": ROWS.long()}, TypeError, "query_start is torch.int64"),
        ({"query_start": ROWS.int()[:0]}, ValueError, "query_start is empty"),
        ({"max_depth": -1}, ValueError, "max_depth is -1"),
        ({"choices": torch.zeros(3, dtype=torch.int64, device="meta")}, ValueError, "choices is on meta"),
        ({"query_start": torch.tensor([0, 2], dtype=torch.int32)}, ValueError, r"query_start is \[0, 2\]"),
        ({"query_start": torch.tensor([0, 4, 3], dtype=torch.int32)}, ValueError, r"query_start is \[0, 4, 3\]"),
        ({"parents": torch.tensor([-1, 0, 3])}, ValueError, "parents holds values from -1 to 3"),
    ],
)
def test_wrong_argument_of_the_walk(changed: dict, error: type[Exception], message: str) -> None:
    good = {"query_start": torch.tensor([0, 3], dtype=torch.int32), "max_depth": 3}
    with pytest.raises(error, match=message):
        accept_walk(**(WALK | good | changed))
