"""The losses of training against the plain formulas and their autograd gradients, and the weights of slots."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from training_tiny import CPU

from jetflow_train.losses import LOSSES, Divergence, SlotAcceptance, draft_index, slot_hits, sparse_teacher
from jetflow_triton.distill import Kind

VOCABULARY = torch.cat([torch.arange(0, 50)[::2], torch.tensor([1, 3, 5, 7, 9])]).sort().values


def example(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    hidden, table = torch.randn(rows, 12), torch.randn(30, 12)
    full = torch.log_softmax(torch.randn(rows, 50), dim=-1)
    best = full.topk(9, dim=-1)
    return hidden, table, best.indices, best.values, torch.rand(rows)


def plain(
    kind: str,
    logits: torch.Tensor,
    ids: torch.Tensor,
    logp: torch.Tensor,
    temperature: float,
    teacher_temperature: float,
) -> torch.Tensor:
    """D of each row, over the whole draft vocabulary and one more event: every token that the teacher does not name."""
    rows = len(logits)
    kept = logp.exp() if teacher_temperature == 1.0 else torch.softmax(logp / teacher_temperature, dim=-1)
    p = torch.zeros(rows, 50).scatter(1, ids, kept)[:, VOCABULARY]
    named = torch.zeros(rows, 50).scatter(1, ids, 1.0)[:, VOCABULARY] > 0
    log_q = torch.log_softmax(logits / temperature, dim=-1)
    if kind == "forward_kl":
        return (torch.xlogy(p, p) - p * log_q).sum(-1)
    if kind == "cross_entropy":
        target = draft_index(VOCABULARY, 50, CPU)[ids[:, 0]]
        return torch.where(target >= 0, -log_q.gather(1, target.clamp_min(0)[:, None])[:, 0], 0.0)
    rest_p = (1 - p.sum(-1)).clamp_min(2.0**-20)
    rest_q = torch.where(named, 0.0, log_q.exp()).sum(-1).clamp_min(2.0**-20)
    if kind == "reverse_kl":
        inside = torch.where(named, log_q.exp() * (log_q - torch.where(named, p, 1.0).log()), 0.0)
        return inside.sum(-1) + rest_q * (rest_q / rest_p).log()
    return (torch.where(named, (log_q.exp() - p).abs(), 0.0).sum(-1) + (rest_q - rest_p).abs()) / 2


@pytest.mark.parametrize(("temperature", "teacher_temperature"), [(1.0, 1.0), (1.0, 0.5), (2.0, 2.0)])
@pytest.mark.parametrize("rows", [1, 131])  # more than the op takes at a time
@pytest.mark.parametrize("kind", get_args(Kind))
def test_value_and_gradient_equal_the_plain_formula(
    kind: Kind, rows: int, temperature: float, teacher_temperature: float
) -> None:
    hidden, table, ids, logp, weight = example(rows)
    fused_input, plain_input = (hidden.clone().requires_grad_() for _ in range(2))
    index = draft_index(VOCABULARY, 50, CPU)
    fused = Divergence(kind, temperature, teacher_temperature)(fused_input, table, index[ids], logp, weight)
    divergence = plain(kind, plain_input @ table.T, ids, logp, temperature, teacher_temperature)
    expected = temperature**2 * (weight * divergence).sum()
    torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-5)
    (3 * fused).backward()
    (3 * expected).backward()
    torch.testing.assert_close(fused_input.grad, plain_input.grad, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_minimum_is_the_teacher(kind: Kind) -> None:
    ids, probs = torch.tensor([[0, 2]]), torch.tensor([[0.7, 0.3]])
    logits = torch.tensor([[0.0, -3.0, 0.5]], requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for step in range(1000):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 1000)
        optimizer.zero_grad()
        Divergence(kind)(logits, torch.eye(3), ids, probs.log(), torch.ones(1)).backward()
        optimizer.step()
    wanted = [1.0, 0.0, 0.0] if kind == "cross_entropy" else [0.7, 0.0, 0.3]
    torch.testing.assert_close(logits.softmax(-1).detach(), torch.tensor([wanted]), rtol=0, atol=0.02)


def test_temperature_must_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature 0"):
        sparse_teacher(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), draft_index(None, 2, CPU), 0.0)


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([1, 3], device="meta")])
def test_the_index_lives_where_the_head_does(vocabulary: torch.Tensor | None) -> None:
    assert draft_index(vocabulary, 5, torch.device("meta")).device.type == "meta"


def test_the_options_know_every_loss() -> None:
    assert LOSSES == ("forward_kl", "reverse_kl", "cross_entropy", "total_variation")


def test_reach_starts_as_the_weights_of_gamma_and_follows_what_is_measured() -> None:
    acceptance = SlotAcceptance(4, 3.0)
    assert acceptance.reach() == pytest.approx([math.exp(-k / 3) for k in range(4)])
    for _ in range(200):
        acceptance.add(torch.tensor([[800, 300, 50, 0], [1000, 500, 100, 0]]))
    assert acceptance.reach() == pytest.approx([1.0, 0.8, 0.48, 0.24], abs=0.02)
    assert SlotAcceptance(3, None).reach() == (1.0, 1.0, 1.0)


def test_hits_are_counted_by_slot() -> None:
    hidden, table = torch.eye(4)[[0, 1, 2, 3, 0]], torch.eye(4)
    counts = slot_hits(hidden, table, torch.tensor([0, 2, 2, -1, 0]), torch.tensor([1, 1, 2, 2, 4]), 5)
    assert counts.tolist() == [[1, 1, 0, 1, 0], [2, 2, 0, 1, 0]]
