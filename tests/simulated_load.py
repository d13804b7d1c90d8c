"""A machine, a drafter and a target made of numbers, to run the budget policy on: no model, no real clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jetflow_core.budget import Budget, BudgetPolicy, Spent
from jetflow_core.request import Request
from jetflow_core.sampling import SamplingParams
from jetflow_core.scheduler import Share
from jetflow_core.tree import DraftTree
from score_tables import ScoreTable, best_first_trees


class NoText:
    def push(self, token: int, /) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Machine:
    """True costs in seconds: of a target pass by rows and reads (rows × prefix tokens), and of a draft by requests."""

    step: Callable[[int, int], float]
    draft: Callable[[int], float]
    noise: float = 0.03
    stalls: float = 0.01  # chance that something else holds the machine up threefold


class SimulatedLoad:
    """`concurrency` endless requests under one budget. `truth` times the draft's probability is what the target accepts."""

    def __init__(
        self,
        machine: Machine,
        budget: Budget,
        concurrency: int,
        *,
        truth: float = 0.8,
        prefix: int = 100,
        seed: int = 0,
    ) -> None:
        self.machine, self.truth = machine, truth
        self.random = np.random.default_rng(seed)
        self.now = 0.0
        self.policy = BudgetPolicy(lambda: self.now)
        self.budget: Budget = budget
        self.requests: list[Request] = []
        self.pool = draft_pool()
        self.trees: dict[str, DraftTree] = {}  # of the last step
        self.resize(concurrency, prefix)

    def resize(self, concurrency: int, prefix: int = 100) -> None:
        """Another number of running requests."""
        while len(self.requests) < concurrency:
            request = Request(
                f"r{len(self.requests)}",
                [1] * (prefix + 1),
                SamplingParams(max_tokens=10**6),
                vocab_size=2,
                max_model_len=10**7,
                eos_ids=(),
                detokenizer=NoText,
                budget=self.budget,
            )
            request.num_cached = prefix
            self.requests.append(request)
        del self.requests[concurrency:]

    def set_prefix(self, *prefixes: int) -> None:
        """The cached tokens of each request from now on."""
        for request, prefix in zip(self.requests, prefixes, strict=True):
            request.tokens, request.num_cached = [1] * (prefix + 1), prefix

    def run(self, steps: int) -> float:
        """Tokens a second over `steps` steps, in true time: without the noise that the policy's clock sees."""
        tokens, seconds = 0, 0.0
        for _ in range(steps):
            more, took = self._step()
            tokens, seconds = tokens + more, seconds + took
        return tokens / seconds

    def static(self, nodes: int) -> float:
        """Tokens a second that a fixed budget of `nodes` reaches here, exactly."""
        prefix, count = self.requests[0].num_cached, len(self.requests)
        chances = [np.exp(tree.scores) * self.truth**tree.depths for tree in self.pool]
        tokens = np.mean([own[: nodes + 1].sum() for own in chances])
        rows = (1 + nodes) * count
        seconds = self.machine.step(rows, rows * prefix) + (self.machine.draft(count) if nodes else 0)
        return count * float(tokens) / seconds

    def _step(self) -> tuple[int, float]:
        policy, machine = self.policy, self.machine
        policy.allot(self.requests)
        shares = [Share(request, 1, request.budget) for request in self.requests]
        trees: dict[str, DraftTree] = {}
        drafting = [share for share in shares if share.draft]
        true = 0.0
        if drafting:
            policy.draft_begins()
            picks = self.random.integers(0, len(self.pool), len(drafting))
            drafts = {s.request.id: self.pool[p].cut(s.draft) for s, p in zip(drafting, picks, strict=True)}
            true += self._pass(machine.draft(len(drafting)))
            trees = policy.cut(shares, drafts)
        rows = [len(trees[r.id]) if r.id in trees else 1 for r in self.requests]
        reads = sum(n * r.num_cached for n, r in zip(rows, self.requests, strict=True))
        true += self._pass(machine.step(sum(rows), reads))
        self.trees = trees
        paths = [self._walk(trees.get(request.id)) for request in self.requests]
        policy.learn(
            [
                Spent(request, n, request.num_cached, trees.get(request.id), np.array(path))
                for request, n, path in zip(self.requests, rows, paths, strict=True)
            ]
        )
        return sum(map(len, paths)), true

    def _pass(self, seconds: float) -> float:
        slow = 3.0 if self.random.random() < self.machine.stalls else 1.0
        self.now += seconds * slow * float(np.exp(self.random.normal(0, self.machine.noise)))
        return seconds

    def _walk(self, tree: DraftTree | None) -> list[int]:
        """The accepted path: each child is the target's choice with `truth` times its conditional draft probability."""
        path = [0]
        while tree is not None:
            children = np.nonzero(tree.parents == path[-1])[0]
            chances = self.truth * np.exp(tree.scores[children] - tree.scores[path[-1]])
            hit = np.searchsorted(np.cumsum(chances), self.random.random())
            if hit == len(children):
                break
            path.append(int(children[hit]))
        return path


def draft_pool(size: int = 32, depths: int = 8, width: int = 8) -> Sequence[DraftTree]:
    """Ranked trees of many difficulties."""
    random = np.random.default_rng(7)

    def rows(sharpness: float, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        logits = random.normal(0, sharpness, (*shape, width))
        logits = np.concatenate([logits, np.zeros((*shape, 1))], axis=-1)  # the last is what was not drafted
        return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[..., :-1].astype(np.float32)

    tokens = np.arange(depths * width).reshape(depths, width)
    pool = [ScoreTable(tokens, rows(s), rows(s, depths - 1, width)) for s in np.linspace(0.5, 5, size)]
    return best_first_trees([0] * size, pool, [64] * size, [depths] * size)
