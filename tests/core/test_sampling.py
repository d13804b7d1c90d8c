"""The target's choice: greedy rules, filters, distribution, and independence of everything but the row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetflow_core.sampling import Choice, SamplingParams, choose


def sampled(logits: Tensor, positions: Tensor, seed: int = 0, **params: object) -> Tensor:
    """Choices of one request over all rows."""
    values = SamplingParams(**{"temperature": 1.0, **params})  # pyright: ignore[reportArgumentType]
    return choose(logits, [Choice(slice(0, len(logits)), values, positions, seed)])


def draws(row: Tensor, n: int = 4000, seed: int = 0, **params: object) -> Tensor:
    """Counts per token over `n` positions of the same logits."""
    chosen = sampled(row.expand(n, -1), torch.arange(n), seed, **params)
    return torch.bincount(chosen, minlength=len(row))


def chi_square_excess(counts: Tensor, probs: Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean; impossible tokens must not occur."""
    assert counts[probs == 0].sum() == 0
    counts, probs = counts[probs > 0].double(), probs[probs > 0].double()
    expected = probs * counts.sum()
    freedom = max(1, len(counts) - 1)
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


# --- greedy ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_and_the_lowest_of_ties(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 5000, dtype=dtype)
    logits[1, [4999, 17, 300]] = 2
    logits[2, 4999] = 1
    logits[3] = -1
    assert choose(logits, []).tolist() == [0, 17, 4999, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_a_choice_give_minus_one_and_spare_the_others(temperature: float) -> None:
    logits = torch.randn(6, 50)
    clean = sampled(logits, torch.arange(6), temperature=temperature)
    broken = logits.clone()
    broken[1, 7] = math.nan
    broken[2] = -math.inf
    broken[3, 0] = math.inf
    broken[4] = math.nan
    chosen = sampled(broken, torch.arange(6), temperature=temperature)
    assert chosen[1:5].tolist() == [-1] * 4
    assert chosen[[0, 5]].tolist() == clean[[0, 5]].tolist()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9, "top_k": 3}, {"min_p": 0.1}])
def test_minus_infinity_is_never_chosen(params: dict[str, float]) -> None:
    logits = torch.full((200, 30), -math.inf)
    logits[:, [3, 8]] = torch.randn(200, 2)
    assert set(sampled(logits, torch.arange(200), **params).tolist()) <= {3, 8}


def test_logits_are_left_alone() -> None:
    logits = torch.randn(3, 20)
    before = logits.clone()
    params = SamplingParams(temperature=0.7, top_p=0.5, top_k=4, min_p=0.1)
    choose(logits, [Choice(slice(0, 3), params, torch.arange(3), 1)])
    assert torch.equal(logits, before)


# --- distribution ---


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", [0, -1, 2**63])
def test_samples_follow_the_softmax(temperature: float, seed: int) -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.5])
    counts = draws(row, 8000, seed, temperature=temperature)
    assert chi_square_excess(counts, (row / temperature).softmax(-1)) < 5


def test_the_distribution_test_can_fail() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.5])
    assert chi_square_excess(draws(row, 8000), (row / 1.2).softmax(-1)) > 5


def test_samples_over_seeds_at_one_position_follow_the_softmax() -> None:
    row = torch.tensor([1.0, 0.0, -1.0, 0.3])
    at = torch.tensor([11])
    choices = [Choice(slice(i, i + 1), SamplingParams(temperature=1.0), at, i) for i in range(4000)]
    counts = torch.bincount(choose(row.expand(4000, -1), choices), minlength=4)
    assert chi_square_excess(counts, row.softmax(-1)) < 5


def test_neighbouring_positions_are_independent() -> None:
    row = torch.tensor([0.5, 0.0, -0.5])
    chosen = sampled(row.expand(9000, -1), torch.arange(9000))
    for gap in (1, 2, 64):
        pairs = torch.bincount(chosen[:-gap] * 3 + chosen[gap:], minlength=9)
        probs = row.softmax(-1)
        assert chi_square_excess(pairs, (probs[:, None] * probs).flatten()) < 5


def test_a_flat_wide_vocabulary_is_used_evenly() -> None:
    counts = draws(torch.zeros(4096), 8192)
    by_block = counts.view(64, 64)
    flat = torch.full((64,), 1 / 64)
    assert chi_square_excess(by_block.sum(0), flat) < 5
    assert chi_square_excess(by_block.sum(1), flat) < 5


def test_a_rare_token_comes_as_often_as_it_should() -> None:
    row = torch.zeros(64)
    row[5] = math.log(63 * 0.002 / 0.998)
    assert 15 < int(draws(row, 20000)[5]) < 70  # mean 40


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(50, 40) * 100
    assert torch.equal(sampled(logits, torch.arange(50), temperature=1e-300), logits.argmax(-1))


# --- filters ---


def kept_by_definition(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters spelled out token by token: a token stays when few enough tokens are strictly more probable."""
    weights = {i: math.exp((x - max(row)) / temperature) for i, x in enumerate(row)}
    if top_k:
        weights = {i: w for i, w in weights.items() if sum(v > w for v in weights.values()) < top_k}
    total = sum(weights.values())
    if top_p < 1:
        weights = {i: w for i, w in weights.items() if sum(v for v in weights.values() if v > w) < top_p * total}
    return {i for i, w in weights.items() if w >= min_p}


@settings(max_examples=60, deadline=None)
@given(
    row=st.lists(st.integers(-4, 4), min_size=2, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 99]),
    top_p=st.sampled_from([1.0, 0.97, 0.631, 0.317, 0.011]),
    min_p=st.sampled_from([0.0, 0.029, 0.31, 0.97]),
)
def test_filters_keep_what_their_definition_says(
    row: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    kept = kept_by_definition([float(x) for x in row], temperature, top_k, top_p, min_p)
    counts = draws(torch.tensor(row).float(), 300, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    seen = {i for i, count in enumerate(counts.tolist()) if count}
    assert seen <= kept
    weights = torch.tensor([math.exp(x / temperature) if i in kept else 0.0 for i, x in enumerate(row)])
    assert chi_square_excess(counts, weights / weights.sum()) < 8


def test_top_k_one_is_greedy() -> None:
    logits = torch.randn(40, 100)
    assert torch.equal(sampled(logits, torch.arange(40), top_k=1), logits.argmax(-1))


def test_top_k_keeps_ties_with_the_kth() -> None:
    assert {i for i, n in enumerate(draws(torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0]), top_k=2)) if n} == {0, 1, 2, 3}


def test_top_p_counts_within_top_k() -> None:
    # 0.5 0.25 0.15 0.1: of the two that top-k keeps, the first holds 2/3.
    row = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert {i for i, n in enumerate(draws(row, top_k=2, top_p=0.6)) if n} == {0}
    assert {i for i, n in enumerate(draws(row, top_p=0.6)) if n} == {0, 1}


def test_filters_work_on_the_scaled_distribution() -> None:
    row = torch.tensor([0.5, 0.3, 0.2]).log()
    assert {i for i, n in enumerate(draws(row, top_p=0.55)) if n} == {0, 1}
    assert {i for i, n in enumerate(draws(row, top_p=0.55, temperature=0.25)) if n} == {0}
    assert {i for i, n in enumerate(draws(row, min_p=0.5)) if n} == {0, 1}
    assert {i for i, n in enumerate(draws(row, min_p=0.5, temperature=3.0)) if n} == {0, 1, 2}


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_a_nucleus_wider_than_the_sorted_head_is_whole(top_p: float) -> None:
    row = -torch.arange(4000.0)[torch.randperm(4000, generator=torch.Generator().manual_seed(1))] / 1500
    probs = row.double().softmax(-1)
    before = torch.stack([probs[probs > p].sum() for p in probs])
    kept = (before < top_p).nonzero().squeeze(-1)
    counts = draws(row, 1500, top_p=top_p)
    assert set(counts.nonzero().squeeze(-1).tolist()) <= set(kept.tolist())
    least = kept[probs[kept].argsort()[: len(kept) // 4]]
    assert counts[least].sum() > 0.5 * 1500 * probs[least].sum() / probs[kept].sum()


# --- a row depends on itself only ---


@st.composite
def requests(draw: st.DrawFn) -> tuple[Tensor, list[Choice]]:
    """A batch of random requests with tree-like rows (positions repeat), some greedy."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    vocab = draw(st.sampled_from([3, 37, 1500]))
    choices: list[Choice] = []
    start = 0
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 5))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.3])),
            top_k=draw(st.sampled_from([0, 2, 20])),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            min_p=draw(st.sampled_from([0.0, 0.05])),
        )
        positions = draw(st.integers(0, 5000)) + torch.randint(0, 3, (rows,), generator=generator)
        seed = draw(st.integers(-(2**63), 2**64 - 1))
        choices.append(Choice(slice(start, start + rows), params, positions, seed))
        start += rows
    return torch.randn(start, vocab, generator=generator) * 2, choices


@settings(max_examples=60, deadline=None)
@given(requests())
def test_a_choice_depends_on_its_row_only(batch: tuple[Tensor, list[Choice]]) -> None:
    logits, choices = batch
    together = choose(logits, choices)
    for choice in choices:
        for offset, row in enumerate(range(choice.rows.start, choice.rows.stop)):
            own = Choice(
                slice(0, 1),
                choice.params,
                choice.positions[offset : offset + 1],
                choice.seed,
            )
            assert choose(logits[row : row + 1], [own]).item() == together[row]


def test_order_of_requests_does_not_matter() -> None:
    logits = torch.randn(6, 300)
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=0.5, top_p=0.8), SamplingParams()]
    forward = [Choice(slice(2 * i, 2 * i + 2), p, torch.tensor([5, 6]), 9) for i, p in enumerate(params)]
    assert torch.equal(choose(logits, forward), choose(logits, forward[::-1]))


def test_equal_rows_of_a_tree_at_one_position_choose_alike() -> None:
    logits = torch.randn(1, 500).expand(8, -1)
    assert len(set(sampled(logits, torch.full((8,), 42)).tolist())) == 1


@pytest.mark.parametrize("other", [{"seed": 1}, {"positions": torch.arange(64) + 64}])
def test_seed_and_position_change_the_choice(other: dict[str, object]) -> None:
    logits = torch.zeros(64, 100)
    base = sampled(logits, torch.arange(64))
    changed = sampled(logits, **{"positions": torch.arange(64), **other})  # pyright: ignore[reportArgumentType]
    assert (base == changed).float().mean() < 0.2


def reference_noise(seed: int, position: int, token: int) -> float:
    """Uniform of (seed, position, token) in plain Python integers; the smallest wins among equal logits."""
    golden, wrap = 0x9E3779B97F4A7C15, 2**64

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % wrap
        x = (x ^ x >> 27) * 0x94D049BB133111EB % wrap
        return x ^ x >> 31

    key = mix((mix(seed % wrap) + (position + 1) * golden) % wrap)
    bits = mix((key + (token + 1) * golden) % wrap)
    return min(bits, wrap - bits) / 2**63


@pytest.mark.parametrize("seed", [0, 1234, -5, 2**64 - 5, 2**63])
def test_the_noise_of_a_seed_is_fixed(seed: int) -> None:
    """It is part of what a seed promises: the same text in any version and on any device."""
    positions = [0, 1, 77, 2**31 + 3]
    chosen = sampled(torch.zeros(4, 400), torch.tensor(positions), seed)
    assert chosen.tolist() == [min(range(400), key=lambda t: reference_noise(seed, p, t)) for p in positions]
