"""Who runs in a step, and with how many tokens. Pure Python: it knows requests and pages, no tensor."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jetflow_core.block_pool import BlockPool
from jetflow_core.request import Request

# Prefill gets at least this part of a step's tokens while decodes run, so that long prompts progress in every step.
PREFILL_SHARE = 0.25


@dataclass(frozen=True)
class Share:
    """A request's part of a step: `known` >= 1 decided tokens from `num_cached` on, then up to `draft` tree nodes.

    The tree hangs off the last known token; only a decoding request (`known` 1, all else cached) has one.
    """

    request: Request
    known: int
    draft: int


class Scheduler:
    """Running and waiting requests over one block pool, both in order of arrival.

    Admission is first come, first served, so every running request is older than every waiting one. A preempted
    request (always the youngest that runs) goes back to the front with its tokens and is computed again later.

    With `prefix_cache`, full pages outlive their request in the pool. A request takes the pages it finds there instead of
    computing them, at admission and at any page border of its prefill; while an older one computes its next page, it waits.

    `hit_tokens` and `preemptions` count from the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_model_len: int,
        draft_slots: int,
        prefix_cache: bool = True,
    ) -> None:
        """`draft_slots`: slots after `num_cached` that the drafter's own block needs, 0 without a head.

        Raises ValueError when `max_running` < 1 or `max_batch_tokens` leaves no token for a prefill beside
        `max_running` decodes.
        """
        if max_running < 1:
            raise ValueError(f"max_running is {max_running}; it must be at least 1")
        if max_batch_tokens <= max_running:
            raise ValueError(
                f"max_batch_tokens ({max_batch_tokens}) must exceed max_running ({max_running}): "
                "each running request takes at least one token a step, and a prefill needs one beside them"
            )
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.draft_slots = draft_slots
        self.prefix_cache = prefix_cache
        self.hit_tokens = 0
        self.preemptions = 0
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.running or self.waiting)

    @property
    def pending_prefill(self) -> int:
        """Prompt tokens that the next step may read: those of running requests, and of waiting ones that find a place."""
        pending = 0
        for request in itertools.islice(self._all(), self.max_running):
            if not request.is_decoding:
                pending += len(request.tokens) - request.num_cached
        return min(pending, self.max_batch_tokens)

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ValueError when its id is in use or the whole pool could never hold it."""
        if any(request.id == other.id for other in self._all()):
            raise ValueError(f"request id {request.id!r} is already in use")
        slots = self.pool.num_blocks * self.pool.page_size
        if request.max_slots > slots:
            raise ValueError(
                f"request {request.id!r} may need {request.max_slots} cache slots, but the whole cache has {slots}: "
                "lower max_tokens, shorten the prompt or enlarge the cache"
            )
        assert request.status == "waiting", f"request {request.id} is not new"
        request.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Drop a request and release its pages; None when it is not here (any more)."""
        for request in self._all():
            if request.id == request_id:
                self.finish(request)
                return request
        return None

    def finish(self, request: Request) -> None:
        """Take a request out, running or waiting, and release its pages."""
        assert request.status != "finished", f"request {request.id} is not here"
        (self.running if request.status == "running" else self.waiting).remove(request)
        self._release_all(request)
        request.status = "finished"

    def register(self, request: Request, sound: bool) -> None:
        """Let others share the pages that a step has filled; call it when both caches and `tokens` hold the step's tokens.

        `sound`: the step gave finite values only. A request that ever had others registers nothing more.
        """
        request.sound = request.sound and sound
        if not (self.prefix_cache and request.sound):
            return
        page = self.pool.page_size
        full = min(request.num_cached, len(request.tokens)) // page  # a stop may lie before the accepted path's end
        for index in range(request.num_registered, full):
            request.blocks[index] = self.pool.register(request.blocks[index], request.page_key(index, page))
        request.num_registered = full

    def check(self) -> None:
        """Assert that the requests' block tables account for every page of the pool."""
        self.pool.check(request.blocks for request in self._all())

    def trim(self, request: Request) -> None:
        """Release the blocks beyond what `num_cached` + 1 slots need; call it after a commit."""
        keep = self.pool.blocks_for(request.num_cached + 1)
        self.pool.release(request.blocks[keep:])
        del request.blocks[keep:]

    def plan(self) -> list[Share]:
        """Shares of the next step in order of arrival, each with the blocks it needs.

        Decodes come first with their budgets, prefills take what is left (and `PREFILL_SHARE` at least), so draft
        trees shrink before any prefill waits. Empty only when there is no work.
        """
        for request in self.running:
            if not request.is_decoding:
                self._take(request, self._hits(request))
        self._secure_next_slots()
        decodes = [r for r in self.running if r.is_decoding]
        left = self.max_batch_tokens - len(decodes)
        wanted = [r.budget if r.remaining > 1 else 0 for r in decodes]
        prefill_limit = min(left, max(left - sum(wanted), int(self.max_batch_tokens * PREFILL_SHARE), 1))
        prefills = [r for r in self.running if not r.is_decoding]
        prefills += self._admit(prefill_limit - len(prefills))
        known = self._plan_prefills(self._without_awaiting(prefills), prefill_limit)
        drafts = self._plan_drafts(decodes, fair_shares(wanted, left - sum(known.values())))
        shares = [
            Share(r, known.get(r.id, 1), drafts.get(r.id, 0)) for r in self.running if r.id in known or r.id in drafts
        ]
        assert all(self._writes_private_blocks(share.request) for share in shares), "a shared page would be written"
        return shares

    def _secure_next_slots(self) -> None:
        """Give every running request a block for its next token, oldest first, preempting the youngest if need be.

        One preempted here is not admitted again in the same step: it needs all it held, and one block of that is gone
        (or, where it failed itself, one more).
        """
        index = 0
        while index < len(self.running):
            request = self.running[index]
            while request.status == "running" and not self._extend(request, request.num_cached + 1):
                self._preempt(self.running[-1])
            index += 1

    def _preempt(self, request: Request) -> None:
        assert len(self.running) > 1, f"request {request.id} does not fit in the pool alone"
        self.running.remove(request)
        self._release_all(request)
        request.computed = max(request.computed, request.num_cached)
        request.num_cached = request.num_registered = 0
        self.preemptions += 1
        request.status = "waiting"
        self.waiting.appendleft(request)

    def _admit(self, limit: int) -> list[Request]:
        """Move up to `limit` waiting requests to running while pages for all their tokens are available.

        A page more for each running one stays: without this reserve their next tokens would preempt the newcomer at once.
        """
        admitted: list[Request] = []
        promised = sum(self._missing_blocks(r) for r in self.running if not r.is_decoding)
        while self.waiting and len(admitted) < limit and len(self.running) < self.max_running:
            request = self.waiting[0]
            hits = self._hits(request)
            promised += self._missing_blocks(request) - len(hits)
            if not self.pool.can_allocate(promised + len(self.running), beside=hits):
                break
            self.waiting.popleft()
            self._take(request, hits)
            request.status = "running"
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _hits(self, request: Request) -> list[int]:
        """Known blocks that continue a request at a page border; never the one of its last token, which is always computed."""
        page = self.pool.page_size
        if not (self.prefix_cache and request.reuses_prefix and request.num_cached == request.num_registered * page):
            return []
        last = (len(request.tokens) - 1) // page
        return self.pool.match(request.page_key(index, page) for index in range(request.num_registered, last))

    def _take(self, request: Request, hits: Sequence[int]) -> None:
        """Share `hits` in place of the blocks it would have written next."""
        if not hits:
            return
        self.pool.share(hits)
        self.pool.release(request.blocks[request.num_registered :])
        request.blocks[request.num_registered :] = hits
        request.num_registered += len(hits)
        before, request.num_cached = request.num_cached, request.num_registered * self.pool.page_size
        self.hit_tokens += request.num_cached - before
        request.cached_tokens += max(0, request.num_cached - max(before, request.computed))

    def _without_awaiting(self, prefills: Sequence[Request]) -> list[Request]:
        """The prefills that compute in this step: all but those whose next page an older one of them is computing."""
        computing: list[Request] = []
        for request in prefills:
            if not any(self._awaits(request, older) for older in computing):
                computing.append(request)
        return computing

    def _awaits(self, request: Request, older: Request) -> bool:
        """Whether the prefill of `older` will register the page that `request` needs next."""
        page, index = self.pool.page_size, request.num_registered
        return (
            self.prefix_cache
            and request.reuses_prefix
            and older.sound
            and request.num_cached == index * page
            and index < min((len(request.tokens) - 1) // page, len(older.tokens) // page)
            and request.page_key(index, page) == older.page_key(index, page)
        )

    def _writes_private_blocks(self, request: Request) -> bool:
        """Whether no one shares the blocks from `num_cached` on, where a step's tokens, trees, moves and draft blocks go."""
        return all(map(self.pool.is_private, request.blocks[request.num_cached // self.pool.page_size :]))

    def _missing_blocks(self, request: Request) -> int:
        """Blocks still to allocate until the request can decode its first new token."""
        return self.pool.blocks_for(min(len(request.tokens) + 1, request.max_slots)) - len(request.blocks)

    def _plan_prefills(self, prefills: Sequence[Request], limit: int) -> dict[str, int]:
        """Chunk per request id. The oldest gets at least half, so that later short prompts pass beside a long one."""
        needs = [len(r.tokens) - r.num_cached for r in prefills]
        known: dict[str, int] = {}
        if not needs:
            return known
        first = min(needs[0], max(-(-limit // 2), limit - sum(needs[1:])))
        for request, share in zip(prefills, [first, *fair_shares(needs[1:], limit - first)], strict=True):
            if chunk := min(share, self._reachable(request)):
                self._extend(request, request.num_cached + chunk)
                known[request.id] = chunk
        return known

    def _plan_drafts(self, decodes: Sequence[Request], shares: Sequence[int]) -> dict[str, int]:
        """Draft nodes per request id, cut to what the free pages and the context hold."""
        drafts: dict[str, int] = {}
        for request, share in zip(decodes, shares, strict=True):
            room = min(self._reachable(request), self.max_model_len - request.num_cached)
            draft = min(share, room - 1) if room >= self.draft_slots else 0
            if draft:
                self._extend(request, request.num_cached + max(1 + draft, self.draft_slots))
            drafts[request.id] = draft
        return drafts

    def _reachable(self, request: Request) -> int:
        """Slots after `num_cached` in its blocks and all available ones."""
        return (len(request.blocks) + self.pool.available) * self.pool.page_size - request.num_cached

    def _extend(self, request: Request, slots: int) -> bool:
        """Grow the block table to `slots` slots; False, with nothing changed, when the pool is short."""
        more = max(0, self.pool.blocks_for(slots) - len(request.blocks))
        if not self.pool.can_allocate(more):
            return False
        request.blocks += self.pool.allocate(more)
        return True

    def _release_all(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks.clear()

    def _all(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """Divide `total` so that no share exceeds its wish and the smallest shares are as large as possible.

    What cannot be divided goes to the earlier ones, a unit each.
    """
    left = total
    for done, wish in enumerate(sorted(wanted)):
        others = len(wanted) - done
        if wish * others > left:
            level = left // others
            break
        left -= wish
    else:
        return list(wanted)
    shares = [min(wish, level) for wish in wanted]
    left = total - sum(shares)
    for index, wish in enumerate(wanted):
        if left and wish > level:
            shares[index] += 1
            left -= 1
    return shares
