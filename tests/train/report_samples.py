"""Evaluations as the command makes them, with chosen numbers."""

from __future__ import annotations

from typing import Any

from jetflow_train.evaluate import Evaluation, Forced, Measurement

FACTS: dict[str, str | int | bool] = {
    "target": "demo model",
    "head": "run/head",
    "cpu": "Some CPU",
    "cores": 4,
    "cores_usable": 2,
    "threads": 2,
    "dtype": "bfloat16",
    "torch": "2.15.0",
}


def measurement(workload: str, budget: int, tau: float, predicted: float | None, **changes: Any) -> Measurement:
    """A measurement with the speed of plain decoding at 20 tokens/s."""
    values: dict[str, Any] = {
        "prompts": 6,
        "tokens": 300,
        "acceptance": [0.5, 0.25],
        "tokens_per_second": 20.0 * tau,
        "plain_tokens_per_second": 20.0,
        "speedup": tau,
        "identical": 6,
    }
    return Measurement(workload, budget, tau=tau, predicted=predicted, **(values | changes))


def evaluation(
    tau: float, predicted: float | None = None, forced: float = 1.0, training: dict[str, Any] | None = None
) -> Evaluation:
    """One workload at budgets 0 and 8; `predicted` defaults to what was measured."""
    plain = measurement("gsm8k", 0, 1.0, None, acceptance=[])
    drafted = measurement("gsm8k", 8, tau, tau if predicted is None else predicted)
    return Evaluation(FACTS, training, {"gsm8k": Forced([0.5, 0.4, 0.3, 0.2], forced)}, [plain, drafted])
