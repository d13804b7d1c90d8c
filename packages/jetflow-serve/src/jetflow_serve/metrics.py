"""Prometheus metrics, named as vLLM names its own with `jetflow:` in front. A registry a server, no label per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from jetflow_core.engine import Engine
    from jetflow_core.request import Output

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass
class Progress:
    """One sequence as the server sees it. Times are of `time.perf_counter`, in seconds; 0 until there is one."""

    started: float
    first: float = 0.0
    last: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_tokens: int = 0
    target_steps: int = 0
    finish: str | None = None


class Metrics:
    """What is counted as it happens; `watch` adds what is read from the engine when somebody asks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http = self._counter("http_requests", "HTTP requests by route and status.", "path", "status")
        self.finished = self._counter("request_finished", "Sequences that ended, by reason.", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of sequences that gave a first token.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.accepted = self._counter("accepted_draft_tokens", "Generated tokens that came out of a draft.")
        self.failures = self._counter("engine_failures", "Steps of the engine that failed.")
        self.first_token = self._seconds("time_to_first_token", "From the request to its first token.")
        self.between = self._seconds(
            "inter_token_latency", "Between two outputs of a sequence, one or more tokens each."
        )
        self.per_token = self._seconds("request_time_per_output_token", "Of a sequence, after its first token.")
        self.whole = self._seconds("e2e_request_latency", "From the request to its last token.")
        self.step = self._seconds("step", "One step of the engine.", STEP_SECONDS)
        self.length = Histogram(
            "jetflow:acceptance_length",
            "Tokens of a sequence that one target pass decided (τ), after its first token.",
            buckets=LENGTHS,
            registry=self.registry,
        )

    def watch(self, engine: Engine) -> None:
        """Show the engine's own numbers too. Call it once."""
        self.registry.register(_Live(engine))

    def output(self, progress: Progress, output: Output, now: float) -> None:
        """Count an output of a sequence that came at `now`, and note it in `progress`."""
        usage = output.usage
        if not progress.first:
            progress.first = now
            progress.prompt_tokens = usage.prompt_tokens
            self.prompt_tokens.inc(usage.prompt_tokens)
            self.first_token.observe(now - progress.started)
        else:
            self.between.observe(now - progress.last)
            self.length.observe(usage.completion_tokens - progress.completion_tokens)
        self.generation_tokens.inc(usage.completion_tokens - progress.completion_tokens)
        self.accepted.inc(usage.accepted_draft_tokens - progress.accepted_tokens)
        progress.last = now
        progress.completion_tokens = usage.completion_tokens
        progress.accepted_tokens = usage.accepted_draft_tokens
        progress.target_steps = usage.target_steps
        if output.finish_reason is not None:
            self.whole.observe(now - progress.started)
            if usage.completion_tokens > 1:
                self.per_token.observe((now - progress.first) / (usage.completion_tokens - 1))
            self.end(progress, output.finish_reason)

    def end(self, progress: Progress, reason: str) -> None:
        """Count the end of a sequence; only the first end counts."""
        if progress.finish is None:
            progress.finish = reason
            self.finished.labels(reason).inc()

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jetflow:{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"jetflow:{name}_seconds", text, buckets=buckets, registry=self.registry)


class _Live(Collector):
    """Reads counters that the engine thread writes; each is one number, so the worst is one that is a step old."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The numbers as they are now."""
        now, drafting = self._engine.stats, self._engine.budgets.state()
        yield GaugeMetricFamily("jetflow:num_requests_running", "Sequences that take part in steps.", now.running)
        yield GaugeMetricFamily("jetflow:num_requests_waiting", "Sequences that wait for a place.", now.waiting)
        pages = GaugeMetricFamily("jetflow:kv_pages", "Pages of the KV cache by state.", labels=["state"])
        for state, count in (("used", now.used_pages), ("cached", now.cached_pages), ("free", now.free_pages)):
            pages.add_metric([state], count)
        yield pages
        yield CounterMetricFamily(
            "jetflow:prefix_cache_hit_tokens", "Tokens found in the prefix cache.", now.hit_tokens
        )
        yield CounterMetricFamily("jetflow:num_preemptions", "Sequences that lost their pages.", now.preemptions)
        for name, text, value in (
            (
                "draft_nodes",
                "Draft tree nodes put through the target; over acceptance_length_count: the mean budget.",
                drafting.nodes,
            ),
            ("drafted_steps", "Steps with a draft, of step_seconds_count.", drafting.drafted_steps),
            ("budget_probes", "Drafts of budget auto that were made to see whether they pay again.", drafting.probes),
            (
                "budget_explorations",
                "Steps of budget auto of a size that was tried to learn its time.",
                drafting.explorations,
            ),
        ):
            yield CounterMetricFamily(f"jetflow:{name}", text, value)
        yield GaugeMetricFamily(
            "jetflow:draft_nodes_last_step", "Draft tree nodes of the last step.", drafting.last_nodes
        )
