"""The kernels between a hidden state and a token, on the CPU under Triton's interpreter.

The interpreter is chosen when the kernels are imported, so `test_vocabulary_kernels.py` runs this file in a process of
its own.
"""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.choice import _log_exponential, accept_walk_twin, sample_twin
from jetflow_triton.distill import distill_loss_twin
from jetflow_triton.kernels import choice as choice_kernels
from jetflow_triton.kernels import distill as distill_kernels
from jetflow_triton.kernels import linear as linear_kernels
from jetflow_triton.kernels import logprobs as logprobs_kernels
from jetflow_triton.linear import linear_twin
from jetflow_triton.logprobs import topk_logprobs_twin

DTYPES = [torch.float32, torch.float16]  # the interpreter has no bfloat16 products
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def close(result: Tensor, expected: Tensor, *, factor: float = 1.0) -> None:
    tolerance = TOLERANCE[expected.dtype] * factor
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


@every_dtype
@pytest.mark.parametrize(("rows", "width", "columns", "biased"), [(1, 64, 40, True), (70, 100, 33, False)])
def test_linear(dtype: torch.dtype, rows: int, width: int, columns: int, biased: bool) -> None:
    x, weight = torch.randn(rows, 2 * width).to(dtype)[:, ::2], (torch.randn(columns, width) / 10).to(dtype)
    bias = torch.randn(columns).to(dtype) if biased else None
    close(linear_kernels.linear(x, weight, bias), linear_twin(x, weight, bias))


@pytest.mark.usefixtures("ordered_dot")
@every_dtype
def test_linear_gives_a_row_the_same_bits_at_any_number_of_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(300, 200).to(dtype), torch.randn(72, 200).to(dtype) / 10
    everything = linear_kernels.linear(x, weight, None)
    for count in (1, 2, 7, 16, 33, 300):
        first = (300 - count) // 2
        assert torch.equal(linear_kernels.linear(x[first : first + count], weight, None), everything[first:][:count])
    order = torch.randperm(300)
    assert torch.equal(linear_kernels.linear(x[order], weight, None), everything[order])


@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
@pytest.mark.parametrize("block_k", [32, 64])
def test_every_tile_adds_along_k_in_the_same_order(block_n: int, block_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product a step of K is not zero, so only the order of the steps decides the rounding."""
    tile = linear_kernels.Tile(block_n, block_k, 4, 1)
    monkeypatch.setattr(linear_kernels, "tile_for", lambda *_: tile)
    steps = torch.randn(20, 9) * 10 ** torch.randint(-3, 4, (20, 9))
    x, weight = torch.zeros(9, 20, 64), torch.ones(40, 20, 64)
    x[:, :, 5] = steps.T
    expected = torch.zeros(9)
    for step in steps:
        expected += step
    result = linear_kernels.linear(x.flatten(1), weight.flatten(1), None)
    assert torch.equal(result, expected[:, None].expand(9, 40))
    assert not torch.equal(steps.flip(0).cumsum(0)[-1], expected)  # another order would show


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts in a small vocabulary, and several turns in a small batch."""
    monkeypatch.setattr(logprobs_kernels, "PART", 32)
    monkeypatch.setattr(logprobs_kernels, "LOGITS_AT_ONCE", 200)


@every_dtype
@pytest.mark.parametrize(("rows", "vocab", "k", "size"), [(5, 90, 4, 70), (1, 40, 40, None), (3, 33, 1, 33)])
@pytest.mark.usefixtures("short_parts")
def test_topk_logprobs(dtype: torch.dtype, rows: int, vocab: int, k: int, size: int | None) -> None:
    hidden, table = torch.randn(rows, 16).to(dtype), torch.randint(-2, 3, (vocab, 16)).to(dtype)
    table[7::9] = table[3].clone()  # ties, across parts too
    results = logprobs_kernels.topk_logprobs(hidden, table, k, size)
    expected = topk_logprobs_twin(hidden, table, k, size)
    for i in (0, 2):
        torch.testing.assert_close(results[i], expected[i], atol=1e-5, rtol=1e-5)
    assert torch.equal(results[1], expected[1])


@pytest.mark.usefixtures("short_parts")
def test_topk_logprobs_of_extreme_logits() -> None:
    logits = torch.full((4, 70), -torch.inf)
    logits[1, [3, 60]], logits[2], logits[3] = 5.0, torch.linspace(-1e4, 1e4, 70), 0.0
    logprobs, ids, logsumexp = torch.empty(4, 3), torch.empty(4, 3, dtype=torch.int64), torch.empty(4)
    logprobs_kernels._topk(logits, 3, logprobs, ids, logsumexp)
    assert logprobs[0].tolist() == [-torch.inf] * 3
    assert logprobs[1].tolist() == [pytest.approx(-0.6931472), pytest.approx(-0.6931472), -torch.inf]
    assert logprobs[2].tolist() == [0.0, pytest.approx(-289.855, abs=1e-2), pytest.approx(-579.71, abs=1e-2)]
    assert ids.tolist() == [[0, 1, 2], [3, 60, 0], [69, 68, 67], [0, 1, 2]]
    assert logsumexp.tolist() == [-torch.inf, pytest.approx(5.6931472), 1e4, pytest.approx(4.2484952)]


@triton.jit
def _noise_kernel(counters, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    noise = choice_kernels._log_exponential(tl.load(counters + index).to(tl.uint64, bitcast=True))
    tl.store(out + index, noise)


def test_noise() -> None:
    counters = torch.randint(-(2**63), 2**63 - 1, (1 << 14,))
    noise = torch.empty(1 << 14)
    _noise_kernel[(1,)](counters, noise, SIZE=1 << 14)
    torch.testing.assert_close(noise, _log_exponential(counters), atol=5e-7, rtol=5e-7)


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_kernels, "BLOCK", 64)


@every_dtype
@pytest.mark.usefixtures("short_steps")
def test_sample(dtype: torch.dtype) -> None:
    rows, vocab = 12, 75
    logits = (torch.randn(rows, vocab + 5) * 3).to(dtype)[:, :vocab]
    logits[:, 40:] = logits[:, 5:40].clone()  # ties
    logits[3, ::2], logits[4], logits[5, 7], logits[6, 7] = -torch.inf, -torch.inf, torch.nan, torch.inf
    temperature = torch.tensor([0.7, 1.5, 0.0, 1.0, 1.0, 1.0, 1.0, 1.2, 0.5, 2.0, 1.1, 0.9])
    top_k = torch.tensor([0, 1, 5, 74, 0, 9, 0, 0, 75, 2**40, 9, 30])
    top_p = torch.tensor([0.9, 1.0, 1.0, 0.9, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.6, 1e-6], dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.0, 0.1]).repeat(4)
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(0, 9999, (rows,))
    args = (logits, temperature, top_k, top_p, min_p, seeds, positions)
    expected = sample_twin(*args)
    assert torch.equal(choice_kernels.sample(*args), expected)
    assert expected[4:7].tolist() == [-1, -1, -1]
    assert len(set(expected.tolist())) > 6


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in divide"
)  # numpy's: a distance is past the range, as it may be
@pytest.mark.usefixtures("short_steps")
def test_sample_at_extreme_temperatures() -> None:
    logits = torch.randn(4, 50)
    ones, zeros = torch.ones(4), torch.zeros(4)
    temperature = torch.tensor([1e-38, 1e-3, 1e38, 1e30])
    args = (logits, temperature, zeros.long(), ones, zeros, torch.arange(4), torch.arange(4))
    assert torch.equal(choice_kernels.sample(*args), sample_twin(*args))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_accept_walk(index: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [reference.random_parents(nodes, generator) if nodes else [] for nodes in (1, 0, 300, 9, 40)]
    starts = torch.tensor([0, *map(len, trees)], dtype=torch.int32).cumsum(0).to(torch.int32)
    parents = torch.tensor([parent for tree in trees for parent in tree], dtype=index)
    tokens = torch.arange(len(parents), dtype=index)  # distinct, so siblings are
    choices = torch.full((len(parents),), -1)
    for b, tree in enumerate(trees):  # a random child, where there is one
        for node, parent in enumerate(tree):
            if parent >= 0:
                choices[starts[b] + parent] = starts[b] + node
    for depth in (400, 2):
        results = choice_kernels.accept_walk(tokens, parents, starts, choices, depth)
        for result, expected in zip(results, accept_walk_twin(tokens, parents, starts, choices, depth), strict=True):
            assert torch.equal(result, expected)
    assert results[1].tolist()[:3] == [1, 0, 3]


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps a row, several chunks a batch."""
    monkeypatch.setattr(distill_kernels, "BLOCK", 32)
    monkeypatch.setattr(distill_kernels, "LOGITS_AT_ONCE", 4 * 75)


KINDS = ["forward_kl", "reverse_kl", "cross_entropy", "total_variation"]


def teachers(rows: int, vocab: int, dtype: torch.dtype) -> dict[str, tuple[Tensor | None, ...]]:
    logprobs, ids = torch.log_softmax(torch.randn(rows, vocab + 20) * 2, -1).topk(9)
    ids = ids.masked_fill(ids >= vocab, -1)
    logprobs[0, 4] = -torch.inf
    hidden, table = torch.randn(rows, 16).to(dtype), (torch.randn(vocab, 16) / 2).to(dtype)
    return {"dense": (hidden, table, None, None), "sparse": (None, None, ids, logprobs)}


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("teacher", ["dense", "sparse"])
@pytest.mark.usefixtures("short_rows")
def test_distill_loss(dtype: torch.dtype, kind: str, teacher: str) -> None:
    rows, vocab = 6, 75
    hidden, table = torch.randn(rows, 16).to(dtype), (torch.randn(vocab, 16) / 2).to(dtype)
    args = (hidden, table, *teachers(rows, vocab, dtype)[teacher], torch.rand(rows), kind, 1.3, 1.0)
    results, expected = distill_kernels.distill_loss(*args, True), distill_loss_twin(*args, True)
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3}[dtype]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=tolerance, rtol=tolerance)
    value, nothing = distill_kernels.distill_loss(*args, False)
    assert value == results[0]
    assert nothing.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("short_rows")
def test_distill_loss_of_extreme_logits(kind: str) -> None:
    hidden, table = torch.randn(3, 8) * 1e4, torch.randn(75, 8) * 1e3
    dense = (torch.randn(3, 8) * 1e4, table, None, None)
    sparse = (None, None, torch.tensor([[3, 5]] * 3), torch.tensor([[0.0, -500.0]] * 3))
    for teacher in (dense, sparse):
        args = (hidden, table, *teacher, None, kind, 1.0, 1.0, True)
        for result, wanted in zip(distill_kernels.distill_loss(*args), distill_loss_twin(*args), strict=True):
            assert result.isfinite().all()
            torch.testing.assert_close(result, wanted, atol=1e-4, rtol=1e-4)
