"""`jetflow-serve bench-serve`: a server under load, budget against budget, over real HTTP."""

from __future__ import annotations

import json
import random
import threading
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jetflow_core.budget import Budget, BudgetPolicy
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.heads import Head
from jetflow_core.model import Decoder
from jetflow_core.tokenizer import Tokenizer
from jetflow_serve.app import ServerSettings, create_app
from jetflow_serve.bench_report import Measured, Row, draw, markdown, measured, summarise
from jetflow_serve.choice import choose_model
from jetflow_serve.choice import load as load_llm
from jetflow_serve.host import describe
from jetflow_serve.load_client import Answer, Target, run_load
from jetflow_serve.measure import warm_up
from jetflow_serve.server import Server, bind
from jetflow_serve.service import EngineService
from jetflow_serve.workload import check_outputs, check_plot, parse_numbers, read_workload

SERVED = "as served"  # the one configuration of a server that is not ours to configure
QUEUE = 4096
WARM_UP = 8  # requests before a run that do not count

Clients = Callable[[Target, Sequence[dict[str, Any]], int, Sequence[float] | None], list[Answer]]


@dataclass(frozen=True)
class Load:
    """`clients` that ask one question after the other, or Poisson arrivals of `rate` requests a second."""

    clients: int
    rate: float | None = None

    @property
    def name(self) -> str:
        """For tables."""
        return str(self.clients) if self.rate is None else f"{self.rate:g}/s"

    def arrivals(self, count: int, seed: int) -> list[float] | None:
        """Seconds from the start of `count` requests."""
        if self.rate is None:
            return None
        gaps = random.Random(seed)
        return list(accumulate(gaps.expovariate(self.rate) for _ in range(count)))


@dataclass(frozen=True)
class Work:
    """What every run asks: `count` of the `prompts`, `max_tokens` each (an end of text does not count)."""

    prompts: list[str]
    count: int
    max_tokens: int
    temperature: float

    def bodies(self, first: int, count: int) -> list[dict[str, Any]]:
        """`count` request bodies, from prompt number `first` on and round again."""
        return [self._body(first + index) for index in range(count)]

    def _body(self, number: int) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self.prompts[number % len(self.prompts)]}],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": self.temperature,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


@dataclass
class Parts:
    """A loaded model out of which a server for any budget is made. Budget 0 has no drafter; `auto` keeps what it learns."""

    model: Decoder
    tokenizer: Tokenizer
    head: Head | None
    config: EngineConfig
    policy: BudgetPolicy

    @property
    def drafts(self) -> bool:
        """Whether a budget above 0 drafts anything."""
        return self.head is not None or self.config.drafter == "lookup"

    @contextmanager
    def serving(self, budget: Budget) -> Generator[Target]:
        """A server with an empty cache on a free port."""
        if budget:
            engine = Engine(self.model, self.tokenizer, self.head, replace(self.config, budget=budget))
        else:
            engine = Engine(self.model, self.tokenizer, None, replace(self.config, budget=0, drafter="auto"))
        if budget == "auto":
            engine.budgets = self.policy
        service = EngineService(engine, QUEUE)
        started = threading.Event()
        listener = bind("127.0.0.1", 0)
        server = Server(create_app(service, ServerSettings("model")), service, started.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            started.wait()
            yield Target(f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join()
            listener.close()


def bench_serve(options: Namespace, write: Callable[[str], None], progress: Callable[[str], None]) -> int:
    """Run the sweep, print the table, write JSON and plot where asked.

    Status 1 when an answer in float32 is not the one of budget 0. Raises ValueError for bad files or options.
    """
    check_outputs({"--json": options.json})
    check_plot("--plot", options.plot)
    rows = [read_workload(Path(path), options.prompts) for path in options.data]
    work = Work(
        [text for workload in rows for _, text in workload.prompts],
        options.requests,
        options.max_tokens,
        options.temperature,
    )
    loads = read_loads(options.concurrency, options.rates, options.requests)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:

        def clients(*arguments: Any) -> list[Answer]:
            return process.submit(run_load, *arguments).result()

        if options.url is not None:
            facts: dict[str, Any] = {"url": options.url}
            target = Target(options.url, options.api_key)
            servers: dict[str, Callable[[], Any]] = {SERVED: lambda: _as_it_is(target)}
        else:
            parts, facts = _load(options, loads)
            servers = {
                str(budget): lambda own=budget: parts.serving(own)
                for budget in read_budgets(options.budgets, parts.drafts)
            }
        table = sweep(servers, loads, work, options.rounds, clients, progress)
    return _report(table, facts, options, write)


def _load(options: Namespace, loads: Sequence[Load]) -> tuple[Parts, dict[str, Any]]:
    choice = choose_model(options.model, options.head, None, None, options.drafter)
    if options.max_running is None:
        options.max_running = max([EngineConfig.max_running, *(load.clients for load in loads if load.rate is None)])
    llm = load_llm(choice, options)
    facts = {"model": choice.name, "head": choice.head or "none", "drafter": choice.drafter, **describe(llm)}
    head = llm.engine.head
    warm_up(llm, ["auto"])
    return Parts(llm.engine.model, llm.tokenizer, head, llm.engine.config, llm.engine.budgets), facts


@contextmanager
def _as_it_is(target: Target) -> Generator[Target]:
    yield target


def sweep(
    servers: Mapping[str, Callable[[], Any]],
    loads: Sequence[Load],
    work: Work,
    rounds: int,
    clients: Clients,
    progress: Callable[[str], None],
) -> list[Row]:
    """A row for every load and server. In a round all servers get the same work in turn, in an order that rotates."""
    rows: list[Row] = []
    for load in loads:
        runs: dict[str, list[Measured]] = {name: [] for name in servers}
        count = max(work.count, 2 * load.clients) if load.rate is None else work.count
        for round_ in range(rounds):
            names = list(servers)
            shift = round_ % len(names)
            for name in [*names[shift:], *names[:shift]]:
                with servers[name]() as target:
                    runs[name].append(_run(target, load, work, round_ * count, count, round_, clients))
                last = runs[name][-1]
                progress(
                    f"load {load.name}, round {round_ + 1}/{rounds}, budget {name}: {last.tokens_per_second:.1f} tokens/s"
                )
        rows += [summarise(load.name, name, runs[name], runs.get("0")) for name in servers]
    return rows


def _run(target: Target, load: Load, work: Work, first: int, count: int, seed: int, clients: Clients) -> Measured:
    """One run after a warm-up on other prompts."""
    clients(target, work.bodies(first + count, min(WARM_UP, 2 * load.clients)), min(load.clients, WARM_UP), None)
    before = _drafting(target)
    answers = clients(target, work.bodies(first, count), load.clients, load.arrivals(count, seed))
    nodes, passes = (after - earlier for after, earlier in zip(_drafting(target), before, strict=True))
    return measured(answers, nodes / passes if passes else 0.0)


def _drafting(target: Target) -> tuple[float, float]:
    """Draft nodes and decoding passes of sequences so far, by the server's metrics; zeros where it has none of that name."""
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(target.get("/metrics"))
        for sample in family.samples
        if not sample.labels
    }
    return values.get("jetflow:draft_nodes_total", 0.0), values.get("jetflow:acceptance_length_count", 0.0)


def read_loads(concurrency: str, rates: Sequence[float] | None, requests: int) -> list[Load]:
    """Loads of the options. Raises ValueError."""
    if rates:
        return [Load(requests, rate) for rate in rates]
    numbers = parse_numbers("--concurrency", concurrency)
    if 0 in numbers:
        raise ValueError("--concurrency holds 0: use 1 or more clients")
    return [Load(number) for number in numbers]


def read_budgets(text: str, drafts: bool) -> list[Budget]:
    """`0,8,auto` in order. Raises ValueError, also where nothing can draft."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [part for part in parts if part != "auto"]
    if numbers:
        parse_numbers("--budgets", ",".join(numbers))
    budgets: list[Budget] = [part if part == "auto" else int(part) for part in dict.fromkeys(parts)]
    if any(budgets) and not drafts:
        raise ValueError(
            f"--budgets {text} needs a draft head: name one with --head, use --drafter lookup, or use --budgets 0"
        )
    return budgets


def _report(table: Sequence[Row], facts: Mapping[str, Any], options: Namespace, write: Callable[[str], None]) -> int:
    settings = {
        name: getattr(options, name)
        for name in (
            "data",
            "prompts",
            "requests",
            "rounds",
            "max_tokens",
            "temperature",
            "concurrency",
            "rates",
            "budgets",
        )
    }
    write("".join(f"{name}: {value}\n" for name, value in facts.items()))
    write(
        f"{options.max_tokens} tokens an answer, {options.requests} requests a run or twice the clients, "
        f"medians of {options.rounds} interleaved rounds\n\n"
    )
    write(markdown(table) + "\n")
    if options.json:
        result = {"host": dict(facts), "settings": settings, "rows": [asdict(row) for row in table]}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    if options.plot:
        draw(table, Path(options.plot), f"{facts.get('model', facts.get('url'))}, {facts.get('cpu', '')}")
    different = any(row.identical < row.compared for row in table)
    return int(different and facts.get("dtype") == "float32")
