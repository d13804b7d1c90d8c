"""The fused sparse forward KL against the plain formula and its autograd gradient."""

from __future__ import annotations

import pytest
import torch
from training_tiny import CPU

from jetflow_train.losses import ROWS_PER_CHUNK, draft_index, forward_kl, sparse_teacher


def example(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    hidden, table = torch.randn(rows, 12), torch.randn(30, 12)
    full = torch.log_softmax(torch.randn(rows, 50), dim=-1)
    best = full.topk(9, dim=-1)
    return hidden, table, best.indices, best.values, torch.rand(rows)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("rows", [1, 7, ROWS_PER_CHUNK + 3])
def test_value_and_gradient_equal_the_plain_formula(rows: int, temperature: float) -> None:
    hidden, table, ids, logp, weight = example(rows)
    vocabulary = torch.arange(0, 50)[::2][:25]
    vocabulary = torch.cat([vocabulary, torch.tensor([1, 3, 5, 7, 9])]).sort().values
    teacher = sparse_teacher(ids, logp, draft_index(vocabulary, 50, CPU), temperature)
    fused_input, plain_input = (hidden.clone().requires_grad_() for _ in range(2))
    fused = forward_kl(fused_input, table, teacher, weight)
    kept = torch.exp(logp) if temperature == 1.0 else torch.softmax(logp / temperature, dim=-1)
    dense = torch.zeros(rows, 50).scatter(1, ids, kept)[:, vocabulary]
    log_q = torch.log_softmax(plain_input @ table.T, dim=-1)
    plain = (weight[:, None] * (torch.xlogy(dense, dense) - dense * log_q)).sum()
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    (3 * fused).backward()
    (3 * plain).backward()
    torch.testing.assert_close(fused_input.grad, plain_input.grad, rtol=1e-4, atol=1e-5)


def test_the_minimum_is_the_teacher() -> None:
    ids, probs = torch.tensor([[0, 2]]), torch.tensor([[0.7, 0.3]])
    teacher = sparse_teacher(ids, probs.log(), draft_index(None, 3, CPU), 1.0)
    logits = torch.zeros(1, 3, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(2000):
        optimizer.zero_grad()
        forward_kl(logits, torch.eye(3), teacher, torch.ones(1)).backward()
        optimizer.step()
    torch.testing.assert_close(logits.softmax(-1).detach(), torch.tensor([[0.7, 0.0, 0.3]]), rtol=0, atol=5e-3)


def test_temperature_must_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature 0"):
        sparse_teacher(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), draft_index(None, 2, CPU), 0.0)


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([1, 3], device="meta")])
def test_the_index_lives_where_the_head_does(vocabulary: torch.Tensor | None) -> None:
    assert draft_index(vocabulary, 5, torch.device("meta")).device.type == "meta"
