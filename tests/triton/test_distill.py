"""The distillation loss against plain formulas in float64: values, gradients, memory."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jetflow_triton import distill as module
from jetflow_triton import distill_loss
from jetflow_triton.distill import Kind

KINDS = get_args(Kind)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_teacher = pytest.mark.parametrize("teacher", ["dense", "sparse"])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def example(
    rows: int, vocab: int = 30, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draft head's side, and both teachers. Entry 0 of a row may have no id, and one more is to be ignored."""
    hidden, table, weights = torch.randn(rows, 12), torch.randn(vocab, 12) / 3, torch.rand(rows)
    full = torch.log_softmax(torch.randn(rows, vocab + 20) * 2, -1)
    logprobs, ids = full.topk(9)
    ids = ids.masked_fill(ids >= vocab, -1)
    logprobs[0, 4] = -torch.inf
    student = {"hidden": hidden, "lm_head": table, "weights": weights.float()}
    teachers = {"teacher_hidden": torch.randn(rows, 7), "teacher_lm_head": torch.randn(vocab, 7) / 2}
    teachers |= {"teacher_ids": ids, "teacher_logprobs": logprobs}
    return (
        {name: x.to(dtype) if name != "weights" else x for name, x in student.items()},
        {name: x.to(dtype) if x.is_floating_point() else x for name, x in teachers.items()},
    )


def only(teachers: dict[str, Tensor], teacher: str) -> dict[str, Tensor]:
    names = ("teacher_hidden", "teacher_lm_head") if teacher == "dense" else ("teacher_ids", "teacher_logprobs")
    return {name: teachers[name] for name in names}


def plain(
    hidden: Tensor,
    lm_head: Tensor,
    weights: Tensor,
    kind: str,
    temperature: float,
    teacher_temperature: float,
    teacher: dict[str, Tensor],
) -> Tensor:
    """float64, full distributions, a row at a time; gradients by autograd."""
    log_q = torch.log_softmax(hidden.double() @ lm_head.double().T / temperature, -1)
    losses = []
    for t, row in enumerate(log_q):
        if "teacher_ids" in teacher:
            logprobs, ids = teacher["teacher_logprobs"][t].double(), teacher["teacher_ids"][t]
            probs = logprobs.exp() if teacher_temperature == 1 else torch.softmax(logprobs / teacher_temperature, -1)
            label = ids[logprobs.argmax()]
            named = (ids >= 0) & (logprobs > -torch.inf)
            probs, ids = probs[named], ids[named]
            p, q = probs, row[ids].exp()
            if kind in ("reverse_kl", "total_variation"):  # one more event
                p, q = torch.cat((p, 1 - p.sum()[None])), torch.cat((q, 1 - q.sum()[None]))
        else:
            logits = teacher["teacher_hidden"][t].double() @ teacher["teacher_lm_head"].double().T
            p, q = torch.softmax(logits / teacher_temperature, -1), row.exp()
            label = logits.argmax()
        if kind == "forward_kl":
            losses.append((p * (p.log() - q.log())).sum())
        elif kind == "reverse_kl":
            losses.append((q * (q.log() - p.log())).sum())
        elif kind == "total_variation":
            losses.append((p - q).abs().sum() / 2)
        else:
            losses.append(-row[label] if label >= 0 else row.sum() * 0)
    return torch.dot(torch.stack(losses), weights.double())


@every_kind
@every_teacher
@pytest.mark.parametrize(("temperature", "teacher_temperature"), [(1.0, 1.0), (1.7, 0.6)])
def test_value_and_gradient(kind: Kind, teacher: str, temperature: float, teacher_temperature: float) -> None:
    student, teachers = example(11)
    chosen = only(teachers, teacher)
    if teacher == "sparse" and teacher_temperature != 1.0:
        if kind in ("reverse_kl", "total_variation"):  # renormalised over its entries: mass is left where one has no id
            chosen["teacher_ids"][:, 5] = -1
        else:
            chosen["teacher_ids"][3] = -1  # nothing that can be drafted
    fused, reference = (student["hidden"].clone().requires_grad_() for _ in range(2))
    heats = {"temperature": temperature, "teacher_temperature": teacher_temperature}
    loss = distill_loss(**(student | chosen | heats | {"hidden": fused}), kind=kind)
    expected = plain(**(student | heats | {"hidden": reference}), kind=kind, teacher=chosen)
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(fused.grad, reference.grad)


@every_kind
@every_teacher
def test_gradcheck(kind: Kind, teacher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 2)
    student, teachers = example(5)
    hidden = student.pop("hidden").requires_grad_()
    rest = student | only(teachers, teacher)
    assert torch.autograd.gradcheck(lambda x: distill_loss(x, **rest, kind=kind, temperature=1.3), (hidden,))


@every_kind
@every_teacher
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(kind: Kind, teacher: str, dtype: torch.dtype) -> None:
    student, teachers = example(module.ROWS_AT_ONCE + 3, dtype=dtype)
    hidden = student.pop("hidden").requires_grad_()
    chosen = only(teachers, teacher)
    loss = distill_loss(hidden, **student, **chosen, kind=kind)
    assert loss.dtype is torch.float32
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.dtype is dtype
    reference = hidden.detach().double().requires_grad_()
    expected = plain(reference, **student, kind=kind, temperature=1.0, teacher_temperature=1.0, teacher=chosen)
    (wanted,) = torch.autograd.grad(expected, reference)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(loss.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gradient.double(), wanted, atol=tolerance, rtol=tolerance)


def test_a_draft_vocabulary_and_no_weights() -> None:
    """A head over some tokens only: its rows of the table, the teacher's ids translated."""
    student, teachers = example(6, vocab=40)
    kept = torch.arange(0, 40, 3)
    index = torch.full((40,), -1).index_copy(0, kept, torch.arange(len(kept)))
    ids, logprobs = teachers["teacher_ids"], teachers["teacher_logprobs"]
    drafted = torch.where(ids < 0, -1, index[ids.clamp_min(0)])
    loss = distill_loss(student["hidden"], student["lm_head"][kept], teacher_ids=drafted, teacher_logprobs=logprobs)
    log_q = torch.log_softmax(student["hidden"] @ student["lm_head"][kept].T, -1)
    p = torch.zeros_like(log_q).scatter_add(1, drafted.clamp_min(0), logprobs.exp().masked_fill(drafted < 0, 0))
    torch.testing.assert_close(loss, (torch.xlogy(p, p) - p * log_q).sum())


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_forward_kl_is_least_at_the_renormalised_teacher(scale: float) -> None:
    ids, probs = torch.tensor([[0, 2, -1]]), torch.tensor([[0.7, 0.3, 1.0 / scale - 1]]) * scale
    logits = torch.tensor([[0.7, 1e-30, 0.3]]).log().requires_grad_()
    loss = distill_loss(logits, torch.eye(3), teacher_ids=ids, teacher_logprobs=probs.log())
    assert torch.autograd.grad(loss, logits)[0].abs().max() < 1e-6
    elsewhere = torch.zeros(1, 3, requires_grad=True)
    worse = distill_loss(elsewhere, torch.eye(3), teacher_ids=ids, teacher_logprobs=probs.log())
    assert worse > loss + 0.1
    assert torch.autograd.grad(worse, elsewhere)[0].abs().max() > 0.1


@every_kind
def test_extreme_logits_are_finite(kind: Kind) -> None:
    hidden, table = torch.randn(4, 8) * 1e4, torch.randn(50, 8) * 1e3
    hidden.requires_grad_()
    dense = {"teacher_hidden": torch.randn(4, 8) * 1e4, "teacher_lm_head": table}
    sparse = {"teacher_ids": torch.tensor([[3, 5]] * 4), "teacher_logprobs": torch.tensor([[0.0, -500.0]] * 4)}
    for teacher in (dense, sparse):
        loss = distill_loss(hidden, table, **teacher, kind=kind)
        assert loss.isfinite()
        assert torch.autograd.grad(loss, hidden)[0].isfinite().all()


class LargestFloats(TorchDispatchMode):
    """Remembers the size of the largest float32 tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor) and result.dtype is torch.float32:
                self.largest = max(self.largest, result.numel())
        return results


@every_kind
@every_teacher
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_live_for_some_rows_at_a_time(kind: Kind, teacher: str, dtype: torch.dtype) -> None:
    rows, vocab = 4 * module.ROWS_AT_ONCE, 300
    student, teachers = example(rows, vocab, dtype)
    hidden = student.pop("hidden").requires_grad_()
    args = (hidden, student["lm_head"])
    chosen = only(teachers, teacher)
    flat = [chosen.get(name) for name in ("teacher_hidden", "teacher_lm_head", "teacher_ids", "teacher_logprobs")]
    with LargestFloats() as mode:  # the op's inside: the mode sees a registered op as one node
        module.distill_loss_twin(*(x.detach() for x in args), *flat, student["weights"], kind, 1.0, 1.0, True)
    assert mode.largest == module.ROWS_AT_ONCE * vocab
    with LargestFloats() as mode:
        distill_loss(*args, **chosen, weights=student["weights"], kind=kind).backward()
    assert mode.largest <= module.ROWS_AT_ONCE * vocab


def test_no_gradient_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teachers = example(3)
    seen = []
    dense = module._dense
    monkeypatch.setattr(module, "_dense", lambda *args: seen.append(args[2].slopes) or dense(*args))
    student["hidden"].requires_grad_()
    with torch.no_grad():
        value = distill_loss(**student, **only(teachers, "dense"))
    assert value == distill_loss(**student, **only(teachers, "dense"))
    assert seen == [False, True]


def test_no_rows() -> None:
    student, teachers = example(1)
    empty = {name: x[:0] if len(x) == 1 else x for name, x in (student | only(teachers, "dense")).items()}
    assert distill_loss(**empty) == 0


GOOD = {"hidden": torch.zeros(3, 8), "lm_head": torch.zeros(9, 8)}
DENSE = {"teacher_hidden": torch.zeros(3, 6), "teacher_lm_head": torch.zeros(9, 6)}
SPARSE = {"teacher_ids": torch.zeros(3, 2).long(), "teacher_logprobs": torch.zeros(3, 2)}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"hidden": torch.zeros(3, 8).long()}, TypeError, "hidden is torch.int64"),
        ({"lm_head": torch.zeros(9, 7)}, ValueError, "lm_head has shape"),
        ({"lm_head": torch.zeros(9, 8).half()}, TypeError, "lm_head is torch.float16"),
        ({"lm_head": torch.zeros(9, 8, requires_grad=True)}, ValueError, "lm_head requires a gradient"),
        ({"teacher_hidden": torch.zeros(2, 6)}, ValueError, "teacher_hidden has 2 rows"),
        ({"teacher_lm_head": torch.zeros(8, 6)}, ValueError, "teacher_lm_head has shape"),
        ({"teacher_lm_head": torch.zeros(9, 6).half()}, TypeError, "teacher_lm_head is torch.float16"),
        ({"teacher_lm_head": None}, ValueError, "one teacher is needed"),
        (SPARSE, ValueError, "one teacher is needed"),
        ({"teacher_hidden": torch.zeros(3, 6, device="meta")}, ValueError, "teacher_hidden is on meta"),
        ({"weights": torch.ones(3, device="meta")}, ValueError, "weights is on meta"),
        ({"kind": "l2"}, ValueError, "kind is 'l2'"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0"),
        ({"teacher_temperature": float("nan")}, ValueError, "teacher_temperature is nan"),
        ({"weights": torch.ones(2)}, ValueError, "weights has shape"),
        ({"weights": torch.ones(3).long()}, TypeError, "weights is torch.int64"),
    ],
)
def test_wrong_argument(changed: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        distill_loss(**(GOOD | DENSE | changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"teacher_ids": torch.zeros(3, 2).int()}, TypeError, "teacher_ids is torch.int32"),
        ({"teacher_ids": torch.zeros(2, 2).long()}, ValueError, "teacher_ids has 2 rows"),
        ({"teacher_ids": torch.tensor([[0, 9]] * 3)}, ValueError, "teacher_ids holds values from 0 to 9"),
        ({"teacher_logprobs": torch.zeros(3, 2, device="meta")}, ValueError, "teacher_logprobs is on meta"),
        ({"teacher_logprobs": torch.zeros(3, 1)}, ValueError, "teacher_logprobs has shape"),
        ({"teacher_logprobs": torch.zeros(3, 2).long()}, TypeError, "teacher_logprobs is torch.int64"),
    ],
)
def test_wrong_sparse_teacher(changed: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        distill_loss(**(GOOD | SPARSE | changed))
