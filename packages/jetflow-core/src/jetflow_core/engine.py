"""The engine: plan, draft, verify, commit. One `step` serves every running request with one target forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from jetflow_core.batch import PagedAttention, Segment, build_batch
from jetflow_core.block_pool import BlockPool
from jetflow_core.budget import Budget, BudgetPolicy, Spent, check_budget
from jetflow_core.drafter import Committed, Drafter, DraftJob
from jetflow_core.heads import Head, context_bytes_per_slot, head_drafter
from jetflow_core.kv_cache import KVCache, free_memory
from jetflow_core.lookup import LookupDrafter
from jetflow_core.merging import MergedDrafter
from jetflow_core.model import Decoder
from jetflow_core.request import Output, Request
from jetflow_core.sampling import SamplingParams
from jetflow_core.scheduler import Scheduler, Share
from jetflow_core.second_pass import check_passes
from jetflow_core.shaping import Shaping, shaped
from jetflow_core.step_clock import PhaseTimes, StepClock
from jetflow_core.tokenizer import Detokenizer, Tokenizer
from jetflow_core.tree import DraftTree, Ints
from jetflow_core.verify import Verified, verify
from jetflow_triton.exact_attention import LAG

MOST_CANDIDATES = 1024

DrafterKind = Literal["auto", "head", "lookup", "head+lookup"]


@dataclass(frozen=True)
class EngineConfig:
    """Limits and budgets. Sizes are in tokens unless they say otherwise.

    `budget`: draft nodes a request and step besides the anchor; 0 decodes autoregressively, "auto" follows the load
    (see `jetflow_core.budget`). `num_pages` None sizes the cache for `max_running` requests of `max_model_len` within
    `cache_gib` GiB, by default a share of the device's free memory.
    `max_model_len` None is what model, head and cache allow.
    `drafter`: who drafts; "auto" is head and lookup where there is a head, else nobody. `candidates`: tokens the head considers
    at each depth. `draft_passes` 2 lets it read its tree once more and grow it again (see `jetflow_core.second_pass`).
    `draft_width`: nodes of a level that get children in an EAGLE head's tree, each of which takes a cache slot while it grows;
    None is the head's own number.
    `draft_depth`, `draft_cutoff` and `draft_temperature` shape the trees (see `jetflow_core.shaping`); a temperature of None is
    each drafter's own, such as the one a head's configuration holds.
    `prefix_cache`: pages of equal beginnings are computed once and kept after their request, until another needs the memory.
    """

    budget: Budget = 8
    page_size: int = 16
    num_pages: int | None = None
    cache_gib: float | None = None
    max_batch_tokens: int = 1024
    max_running: int = 32
    max_model_len: int | None = None
    drafter: DrafterKind = "auto"
    candidates: int = 32
    draft_passes: int = 1
    draft_width: int | None = None
    draft_depth: int | None = None
    draft_cutoff: float = 0.0
    draft_temperature: float | None = None
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        least = {
            "page_size": 1,
            "max_batch_tokens": 1,
            "max_running": 1,
            "candidates": 1,
        }
        check_budget(self.budget)
        check_drafter(self.drafter)
        check_passes(self.draft_passes)
        self.shaping()
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}: use {minimum} or more")
        for name in ("num_pages", "max_model_len", "draft_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: use 1 or more, or leave it out")
        if self.candidates > MOST_CANDIDATES:
            raise ValueError(
                f"candidates is {self.candidates}: use {MOST_CANDIDATES} or fewer, since all their pairs are scored at each depth"
            )
        if self.cache_gib is not None and not 0 < self.cache_gib < float("inf"):
            raise ValueError(f"cache_gib is {self.cache_gib}: use a positive number of GiB, or leave it out")

    def shaping(self, temperature: float = 1.0) -> Shaping:
        """What is done to the trees of a drafter whose own `temperature` this is. Raises ValueError for bad options."""
        own = temperature if self.draft_temperature is None else self.draft_temperature
        return Shaping(self.draft_depth, own, self.draft_cutoff)


def check_drafter(drafter: object) -> None:
    """Raise ValueError for anything but a `DrafterKind`."""
    if drafter not in get_args(DrafterKind):
        raise ValueError(f"drafter is {drafter!r}: use one of {', '.join(get_args(DrafterKind))}")


@dataclass(frozen=True)
class EngineStats:
    """What the engine holds now, and what it has counted since it started (`hit_tokens`, `preemptions`).

    Pages are used (by requests), cached (nobody's, but known by their content and ready to be shared) or free.
    `hit_tokens` were taken from the prefix cache instead of being computed.
    """

    waiting: int
    running: int
    used_pages: int
    cached_pages: int
    free_pages: int
    hit_tokens: int
    preemptions: int


class Engine:
    """Serves requests over one model, one optional draft head and one paged cache. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        head: Head | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.model, self.tokenizer = model, tokenizer
        head = _drafting_head(config.drafter, head)
        if model.exact and head is not None and head.config.block_size - 1 > LAG:
            raise ValueError(
                f"the draft head drafts {head.config.block_size - 1} tokens deep, exact mode takes at most {LAG}: "
                "use another head, or no exact mode"
            )
        self.vocab_size = min(model.config.vocab_size, tokenizer.size if tokenizer else model.config.vocab_size)
        self.device = model.embed.device
        shape = model.config
        limit = _position_limit(model, head)
        num_blocks = config.num_pages or _default_blocks(config, model, head, limit)
        self.max_model_len = _max_model_len(config, limit, num_blocks * config.page_size + 1)
        self.cache = KVCache(
            shape.num_layers,
            num_blocks,
            config.page_size,
            shape.num_kv_heads,
            shape.head_dim,
            model.embed.dtype,
            self.device,
        )
        self.head = head
        self._clock = StepClock()
        self.drafter = _build_drafter(config, head, num_blocks, self._clock)
        self.budgets = BudgetPolicy()
        self.scheduler = Scheduler(
            BlockPool(num_blocks, config.page_size),
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            max_model_len=self.max_model_len,
            draft_slots=self.drafter.block_slots if self.drafter else 0,
            prefix_cache=config.prefix_cache,
        )
        own_eos = tokenizer.eos_token_ids if tokenizer else ()
        self._eos_ids = tuple(dict.fromkeys([*shape.eos_token_ids, *own_eos]))
        self._created = 0

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        """Counts for a monitor, cheap enough to ask after every step."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            used_pages=pool.used,
            cached_pages=pool.cached,
            free_pages=pool.free,
            hit_tokens=scheduler.hit_tokens,
            preemptions=scheduler.preemptions,
        )

    @property
    def phases(self) -> PhaseTimes:
        """Where the time of all steps so far went."""
        return self._clock.times

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, budget: Budget | None = None, cache_salt: str = ""
    ) -> str:
        """Queue a request and return its id. Raises ValueError for a prompt or parameters that can never be served.

        `budget` overrides the engine's node budget for this request; without a drafter nothing is drafted.
        Requests share cached pages only with those of the same `cache_salt`.
        """
        budget = self.config.budget if budget is None else budget
        check_budget(budget)
        self._created += 1
        request = Request(
            f"request-{self._created}",
            prompt_ids,
            params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_ids=self._eos_ids,
            detokenizer=self._detokenizer,
            budget=budget if self.drafter else 0,
            cache_salt=cache_salt,
        )
        self.scheduler.add(request)
        return request.id

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its pages; False when it is not known (any more)."""
        return self.scheduler.abort(request_id) is not None

    def abort_all(self, reason: str, *, waiting: bool = True) -> list[Output]:
        """End every running request, and with `waiting` the queued ones too, with the error `reason`; returns their last outputs.

        This is the way on after `step` has raised: all that took part in that step are still running then. The prefix cache is
        emptied, for nobody knows what the step has left of it.
        """
        scheduler = self.scheduler
        ended = [*scheduler.running, *(scheduler.waiting if waiting else ())]
        for request in ended:
            scheduler.finish(request)
        scheduler.pool.forget()
        return [Output(request.id, [], "", None, reason, request.usage()) for request in ended]

    def check_idle(self) -> None:
        """Assert that nothing is left behind once every request has ended: each page is free or cached."""
        assert not self.has_work
        self.scheduler.pool.check_idle()

    def _detokenizer(self) -> Detokenizer | _NoText:
        return Detokenizer(self.tokenizer) if self.tokenizer else _NoText()

    # -- the step -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Advance every planned request: a chunk of its prompt, or one or more output tokens."""
        self._clock.begin()
        self.budgets.allot(self.scheduler.running, self.scheduler.pending_prefill)
        shares = self.scheduler.plan()
        self._clock.lap("plan")
        if not shares:
            return []
        segments = self._draft(shares)
        hidden, taps = self._forward(segments)
        verified = verify(self.model, self.vocab_size, shares, segments, hidden, self._clock)
        self._commit(verified, taps)
        self._clock.lap("commit")
        outputs = [output for item in verified if (output := self._advance(item)) is not None]
        self.budgets.learn([_spent(item) for item in verified])
        self._settle(verified, hidden)  # last: should anything fail before, no request has left without its output
        self._clock.end()
        return outputs

    def _draft(self, shares: Sequence[Share]) -> list[Segment]:
        """What each share puts through the target: its known tokens, or the tree drafted for its anchor."""
        trees: dict[str, DraftTree] = {}
        drafting = [share.request for share in shares if share.draft > 0]
        if drafting and self.drafter is not None:
            drafts = [share.draft for share in shares if share.draft > 0]
            jobs = [
                DraftJob(request.tokens, request.blocks, draft, request.remaining - 1)
                for request, draft in zip(drafting, drafts, strict=True)
            ]
            self.budgets.draft_begins()
            drafted = {request.id: tree for request, tree in zip(drafting, self.drafter.propose(jobs), strict=True)}
            self._clock.lap("draft")
            trees = self.budgets.cut(shares, drafted)
            self._clock.lap("tree")
        return [_segment(share, trees.get(share.request.id)) for share in shares]

    def _forward(self, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """Hidden states [T, C] and taps [T, K·C] of one target pass over all segments."""
        batch = build_batch(segments, self.config.page_size, self.device)
        attend = PagedAttention(self.cache, batch, self.model.config.head_dim, exact=self.model.exact)
        taps = self.drafter.tap_layers if self.drafter else ()
        self._clock.lap("batch")
        hidden = self.model(batch.input_ids, batch.positions, attend, taps)
        self._clock.lap("verify")
        return hidden

    def _commit(self, verified: Sequence[Verified], taps: Tensor) -> None:
        """Make the accepted rows part of the prefix: move their K/V to contiguous slots and write the drafter's context."""
        page = self.config.page_size
        source, target, before, tokens, positions = [], [], [], [], []
        for item in verified:
            segment, order = item.segment, np.arange(len(item.rows))
            source.append(segment.slots(segment.prefix + item.rows, page))
            target.append(segment.slots(segment.prefix + order, page))
            positions.append(segment.prefix + order)
            tokens.append(segment.ids[item.rows])
            before.append(np.where(positions[-1] > 0, segment.slots(np.maximum(positions[-1] - 1, 0), page), -1))
        origin, place = np.concatenate(source), np.concatenate(target)
        moved = origin != place
        if moved.any():
            self.cache.move(self._tensor(origin[moved]), self._tensor(place[moved]))
        if self.drafter is not None:
            rows = self._tensor(np.concatenate(_flat_rows(verified)))
            ids, where, previous = (self._tensor(np.concatenate(each)) for each in (tokens, positions, before))
            self.drafter.observe(Committed(taps[rows], ids, where, self._tensor(place), previous))

    def _advance(self, item: Verified) -> Output | None:
        """Hand the new tokens to the request; None while its prompt is read."""
        request = item.share.request
        request.num_cached += len(item.rows)
        if item.poisoned:
            request.budget, request.auto = 0, False  # the anchor goes through the target again, alone
        if request.prompt_logprobs is not None:
            request.prompt_logprobs += item.prompt_logprobs
        if not item.tokens:
            return None
        ends_prompt = request.num_output == 0
        error = "the model's logits are not finite, so this request was stopped" if item.failed else None
        kept, text = ([], "") if error else request.append(item.tokens)
        request.target_steps += 1
        request.accepted += min(len(kept), len(item.tokens) - 1)
        return Output(
            request.id,
            kept,
            text,
            request.finish_reason,
            error,
            request.usage(),
            logprobs=None if item.logprobs is None else item.logprobs[: len(kept)],
            prompt_logprobs=request.prompt_logprobs if ends_prompt else None,
        )

    def _settle(self, verified: Sequence[Verified], hidden: Tensor) -> None:
        """Give the filled pages to the prefix cache, and back to the pool what an ended request or a rejected draft held.

        A row sees its own keys and values, so where one of those is not finite, neither is its `hidden` state.
        """
        finite = torch.isfinite(hidden).all(dim=-1).cpu().numpy()
        for item, rows in zip(verified, _flat_rows(verified), strict=True):
            request = item.share.request
            self.scheduler.register(request, sound=not item.failed and bool(finite[rows].all()))
            if item.failed or request.finish_reason is not None:
                self.scheduler.finish(request)
            else:
                self.scheduler.trim(request)

    def _tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


class _NoText:
    """Stands in for a detokeniser where the engine runs on bare token ids."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _flat_rows(verified: Sequence[Verified]) -> list[Ints]:
    """The accepted rows of every share as rows of the flat batch."""
    starts = np.cumsum([0, *(len(item.segment.ids) for item in verified)])
    return [start + item.rows for start, item in zip(starts, verified, strict=False)]


def _spent(item: Verified) -> Spent:
    segment = item.segment
    tree = None if item.poisoned else segment.tree
    return Spent(item.share.request, len(segment.ids), segment.prefix, tree, item.rows)


def _segment(share: Share, tree: DraftTree | None) -> Segment:
    request, start = share.request, share.request.num_cached
    if tree is not None:
        return Segment.of_tree(tree, start, request.blocks)
    return Segment.chain(request.tokens[start : start + share.known], start, request.blocks)


def _drafting_head(drafter: DrafterKind, head: Head | None) -> Head | None:
    """The head that drafts; "lookup" does without. Raises ValueError when one is asked for and there is none."""
    if drafter in ("head", "head+lookup") and head is None:
        raise ValueError(f'drafter is "{drafter}", but there is no draft head: give one, or use "lookup"')
    return None if drafter == "lookup" else head


def _build_drafter(config: EngineConfig, head: Head | None, num_blocks: int, clock: StepClock) -> Drafter | None:
    """What `config` asks for: the head that drafts, lookup, or both, each with its own calibration."""
    parts: list[Drafter] = []
    if head is not None:
        passes, expanded = config.draft_passes, config.draft_width
        drafter = head_drafter(head, num_blocks, config.page_size, config.candidates, clock, passes, expanded)
        parts.append(shaped(drafter, config.shaping(head.config.draft_temperature)))
    if config.drafter in ("lookup", "head+lookup") or (parts and config.drafter == "auto"):
        parts.append(shaped(LookupDrafter(), config.shaping()))
    if len(parts) > 1:
        return MergedDrafter(parts)
    return parts[0] if parts else None


def _position_limit(model: Decoder, head: Head | None) -> int:
    """Positions that both the target and the head can rotate."""
    return min(len(model.cos_sin), head.config.max_position_embeddings if head else len(model.cos_sin))


def _default_blocks(config: EngineConfig, model: Decoder, head: Head | None, limit: int) -> int:
    """Blocks for `max_running` requests of full length, as far as the memory for the cache goes."""
    dtype = model.embed.dtype
    shape = model.config
    bytes_per_slot = KVCache.bytes_per_slot(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    if head is not None:
        bytes_per_slot += context_bytes_per_slot(head, dtype)
    memory = free_memory(model.embed.device) if config.cache_gib is None else int(config.cache_gib * 2**30)
    wanted = config.max_running * (min(config.max_model_len or limit, limit) // config.page_size + 2)
    return max(1, min(wanted, memory // (bytes_per_slot * config.page_size)))


def _max_model_len(config: EngineConfig, limit: int, slots: int) -> int:
    """Tokens of the longest request. Raises ValueError when more was asked for than model, head or cache can hold."""
    wanted = config.max_model_len
    if wanted is not None and wanted > limit:
        raise ValueError(
            f"max_model_len is {wanted}, but the model and its head have {limit} positions: use at most that"
        )
    if wanted is not None and wanted > slots:
        raise ValueError(
            f"max_model_len is {wanted}, but the cache holds {slots - 1} tokens: lower it, or give the cache more pages"
        )
    return min(wanted or limit, slots)
