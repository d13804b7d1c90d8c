"""`jetflow-serve generate`: the text as it comes, then what speculation gained."""

from __future__ import annotations

import secrets
from argparse import Namespace
from collections.abc import Callable

from jetflow_core.budget import Budget
from jetflow_core.sampling import SamplingParams
from jetflow_serve.choice import choose_model, load
from jetflow_serve.host import describe
from jetflow_serve.measure import Run, timed_run, warm_up


def generate(options: Namespace, write: Callable[[str], None]) -> int:
    """Generate once as asked and once at budget 0, and compare. Raises ValueError for a request that cannot be run."""
    choice = choose_model(options.model, options.head, options.budget, None, options.drafter)
    seed = secrets.randbits(31) if options.seed is None else options.seed  # both runs need the same one
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=seed)
    llm = load(choice, options)
    if options.no_chat:
        prompt = llm.tokenizer.encode(options.prompt, allow_special=True, add_special=True)
    else:
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": options.prompt}])
    budgets: list[Budget] = [choice.budget, 0] if choice.budget else [0]
    warm_up(llm, budgets)
    run = timed_run(llm, prompt, params, choice.budget, write)
    write("\n\n")
    baseline = timed_run(llm, prompt, params, 0) if choice.budget else None
    facts = describe(llm)
    sampling = f", temperature {params.temperature} seed {seed}" if params.temperature else ""
    place = f"{facts['dtype']} on {facts.get('gpu', facts['cpu'])}, {facts['threads']} threads"
    write(f"{choice.name}, {place}{sampling}\n{summary(run, baseline, choice.budget)}\n")
    if choice.note:
        write(f"note: {choice.note}\n")
    return 0


def summary(run: Run, baseline: Run | None, budget: Budget) -> str:
    """Speed of `run`, and against `baseline` (the same request at budget 0; None when that is what `run` was)."""
    speed = (
        f"budget {budget}: {len(run.token_ids)} tokens ({run.finish_reason}), first token after {run.prompt_s:.2f} s"
    )
    if run.tokens_per_second is None or run.acceptance_length is None:
        return f"{speed}; too short to measure a speed"
    lines = [f"{speed}, {run.tokens_per_second:.1f} tokens/s, τ = {run.acceptance_length:.2f} tokens a target pass"]
    if baseline is not None and baseline.tokens_per_second is not None:
        ratio = run.tokens_per_second / baseline.tokens_per_second
        same = "identical text" if run.token_ids == baseline.token_ids else "NOT the same text"
        lines.append(f"budget 0: {baseline.tokens_per_second:.1f} tokens/s: speed-up {ratio:.2f}x, {same}")
    return "\n".join(lines)
