"""One timed generation, the unit of `generate` and `bench`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jetflow_core.budget import Budget
from jetflow_core.sampling import SamplingParams
from jetflow_core.step_clock import PhaseTimes

if TYPE_CHECKING:
    from jetflow_core.llm import LLM
    from jetflow_core.request import Output

WARM_UP_TOKENS = 8
LEARNED_BUDGETS = (1, 3, 7, 15, 31)  # steps of 2, 4, 8, 16 and 32 rows


@dataclass(frozen=True)
class Run:
    """What one request took. Decoding is everything after the target pass that gave the first token.

    `accepted`: drafted tokens that each decoding pass accepted. `phases` and `nodes` (drafted and verified) are of these passes.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_s: float
    decode_s: float
    decode_tokens: int
    accepted: tuple[int, ...]
    phases: PhaseTimes
    nodes: int

    @property
    def decode_steps(self) -> int:
        """Target passes of decoding."""
        return len(self.accepted)

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens a second; None when nothing was decoded after the first token."""
        return self.decode_tokens / self.decode_s if self.decode_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """τ: decoded tokens a target pass."""
        return self.decode_tokens / self.decode_steps if self.decode_steps else None


def timed_run(
    llm: LLM,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    budget: Budget | None = None,
    on_text: Callable[[str], None] = lambda _: None,
) -> Run:
    """Run one request on an idle engine and time it; `on_text` gets text as it comes.

    Raises ValueError when the engine refuses the request or fails while it runs.
    """
    outputs: list[Output] = []
    engine = llm.engine
    before, nodes = engine.phases, 0
    times = [time.perf_counter()]
    for output in llm.stream(prompt_ids, params, budget):  # an output a target pass, once the prompt is through
        if output.error is not None:
            raise ValueError(output.error)
        if not outputs:
            before, nodes = engine.phases, engine.budgets.state().nodes
        times.append(time.perf_counter())
        outputs.append(output)
        on_text(output.text)
    return Run(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=outputs[-1].finish_reason or "",
        prompt_s=times[1] - times[0],
        decode_s=times[-1] - times[1],
        decode_tokens=sum(len(output.token_ids) for output in outputs[1:]),
        accepted=tuple(b - a for a, b in itertools.pairwise(output.usage.accepted_draft_tokens for output in outputs)),
        phases=engine.phases - before,
        nodes=engine.budgets.state().nodes - nodes,
    )


def check_request(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """Raise ValueError for a request that the engine would refuse; for a measurement that would meet it late."""
    llm.engine.abort(llm.engine.add(prompt_ids, params))


def warm_up(llm: LLM, budgets: Sequence[Budget | None] = (None,)) -> None:
    """Run a few tokens with each budget, so that kernels are compiled and memory is mapped before anyone waits.

    Budget auto learns what steps of common sizes take. None is the engine's own budget.
    """
    prompt = llm.tokenizer.encode("The quick brown fox", allow_special=False)
    limit = min(WARM_UP_TOKENS, llm.engine.max_model_len - len(prompt))
    if limit < 1:  # a context too small to try anything in
        return
    for budget in budgets:
        own = llm.engine.config.budget if budget is None else budget
        for size in (*LEARNED_BUDGETS, own) if own == "auto" else (own,):
            timed_run(llm, prompt, SamplingParams(max_tokens=limit, ignore_eos=True), size)
