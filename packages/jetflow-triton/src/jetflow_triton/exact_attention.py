"""Tree attention for exact mode: a token's bits are those it has alone, in a prompt chunk, or as a node of a tree.

`tree_attention` sums over the prefix and then over the tree, so a key that has just been committed moves from one sum to
the other, and the order of additions with it. Here the order is a function of a query's own visible keys, counted in
slot order, wherever their slots are: the k-th visible key is at position k of its path.

    keys      0 …                       …  blocks · SPAN  …                        n − 1
              whole blocks of SPAN keys, a product each      the query's own last keys, padded to TAIL

All but the last LAG keys, in whole blocks, are always committed ones, so every query of a sequence finds them in the
same slots; the rest is gathered for each query.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from jetflow_triton.attention import Layout, check_call, check_layout, read_layout, visible_slots
from jetflow_triton.checks import debugging
from jetflow_triton.dispatch import register, uses_op
from jetflow_triton.linear import ROWS

SPAN = 64
LAG = 32
TAIL = SPAN + LAG
AT_ONCE = 8 * ROWS  # queries of the twin at once: the gathered keys of a whole prompt would not fit the memory


def tree_attention_exact(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """`tree_attention` whose rows depend on their query and on the keys they see, in slot order, and on nothing else.

    Scores, weights and sums are float32. Slower than `tree_attention`: it is the price of speculation that is lossless to the
    bit in half precision.

    Args:
        q: and the others as for `tree_attention`; no sliding window. Parents come before their children in a tree.

    Returns:
        `[T, Hq, D]`: the same bits for a query whether the keys it sees are in the prefix or in its tree, whatever
        is in the tree besides.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: as `tree_attention`; and (checked on the CPU) a branching tree is deeper than `LAG` nodes below its root.

    Example:
        >>> q, kv = torch.randn(1, 4, 64), torch.randn(2, 1, 16, 2, 64)
        >>> table, start, prefix = (torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0, 1], [9]))
        >>> tree_attention_exact(q, kv[0], kv[1], table, start, prefix, None, 64**-0.5).shape
        torch.Size([1, 4, 64])
    """
    check_call(q, k_cache, v_cache, block_tables, query_start, prefix_lens, tree_mask)
    if debugging():
        plan_shares(read_layout(q, k_cache, block_tables, query_start, prefix_lens, tree_mask))
    run = _tree_attention_exact if uses_op(q) else tree_attention_exact_twin
    return run(q, k_cache, v_cache, block_tables, query_start, prefix_lens, tree_mask, scale)


def tree_attention_exact_twin(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Plain-torch `tree_attention_exact`: products of one shape only, their sums added one after the other."""
    _, _, kv_heads, width = k_cache.shape
    shares = plan_shares(read_layout(q, k_cache, block_tables, query_start, prefix_lens, tree_mask))
    k_flat, v_flat = k_cache.view(-1, kv_heads, width), v_cache.view(-1, kv_heads, width)
    out = torch.empty_like(q)
    for share in shares:
        rows = slice(share.first, share.last)
        grouped = (q[rows].float() * scale).unflatten(1, (kv_heads, -1))  # [n, Hk, G, D]
        parts = [*_blocks(grouped, k_flat, v_flat, share), _tail(grouped, k_flat, v_flat, share)]
        out[rows] = _merge(parts).flatten(1, 2).to(q.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Share:
    """Some queries of one sequence: rows first … last − 1 of q, n of them."""

    first: int
    last: int
    block_slots: Tensor  # [blocks · SPAN] physical slots of the keys that queries share
    blocks: Tensor  # [n] whole blocks that a query sees
    tail_slots: Tensor  # [n, TAIL] physical slots of its other keys, filled up with its last one
    in_tail: Tensor  # [n, TAIL] bool, false where filled up


Part = tuple[Tensor, Tensor, Tensor]
"""A sum over some keys: highest score [..., Hk, G], sum of weights [..., Hk, G], weighted values [..., Hk, G, D]."""


def _blocks(q: Tensor, k_flat: Tensor, v_flat: Tensor, share: _Share) -> list[Part]:
    """Whole blocks, each a `Part` of all queries [n]; −∞ and zeros for the queries that do not see it."""
    count = share.block_slots.shape[0] // SPAN
    if not count:
        return []
    rows, kv_heads, group, width = q.shape
    # [blocks · Hk, SPAN, D]
    k, v = (x.index_select(0, share.block_slots).float().unflatten(0, (count, SPAN)) for x in (k_flat, v_flat))
    k, v = (x.transpose(1, 2).reshape(-1, SPAN, width) for x in (k, v))
    missing = -rows % ROWS
    padded = torch.cat((q, q.new_zeros(missing, kv_heads, group, width))) if missing else q
    pieces: list[Part] = []
    for chunk in padded.split(ROWS):  # [ROWS, Hk, G, D] → [Hk, ROWS · G, D], the same for every block
        packed = chunk.transpose(0, 1).reshape(kv_heads, ROWS * group, width).repeat(count, 1, 1)
        part = _attend(packed, k, v, None)
        pieces.append(tuple(x.unflatten(0, (count, kv_heads)).unflatten(2, (ROWS, group)) for x in part))  # pyright: ignore
    joined = (torch.cat(each, 2)[:, :, :rows].transpose(1, 2) for each in zip(*pieces, strict=True))
    peak, total, values = joined  # [blocks, n, Hk, G (, D)]
    unseen = (torch.arange(count).unsqueeze(1) >= share.blocks).view(count, rows, 1, 1)
    return list(zip(peak.masked_fill(unseen, -torch.inf), total, values, strict=True))


def _tail(q: Tensor, k_flat: Tensor, v_flat: Tensor, share: _Share) -> Part:
    """The keys that belong to no whole block, gathered for each query."""
    rows, kv_heads, group, width = q.shape
    slots = share.tail_slots.flatten()
    k, v = (x.index_select(0, slots).float().view(rows, TAIL, kv_heads, width) for x in (k_flat, v_flat))
    k, v = (x.transpose(1, 2).reshape(rows * kv_heads, TAIL, width) for x in (k, v))
    hidden = ~share.in_tail.repeat_interleave(kv_heads, 0).unsqueeze(1)
    part = _attend(q.reshape(rows * kv_heads, group, width), k, v, hidden)
    peak, total, values = (x.unflatten(0, (rows, kv_heads)) for x in part)
    return peak, total, values


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Part:
    """q [B, M, D] over keys and values [B, N, D]; `hidden` [B, 1, N] keys do not count."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -torch.inf)
    peak = scores.amax(-1)
    weights = torch.exp(scores - peak.clamp_min(torch.finfo(peak.dtype).min).unsqueeze(-1))
    return peak, weights.sum(-1), torch.bmm(weights, v)


def _merge(parts: list[Part]) -> Tensor:
    """The attention output [n, Hk, G, D]: parts are added in order, and one of no keys changes no bit."""
    peaks = torch.stack([peak for peak, _, _ in parts])
    top = peaks.amax(0).clamp_min(torch.finfo(peaks.dtype).min)
    total, values = torch.zeros_like(top), torch.zeros_like(parts[0][2])
    for peak, part_total, part_values in parts:
        share = torch.exp(peak - top)
        total = total + share * part_total
        values = values + share.unsqueeze(-1) * part_values
    return values / total.clamp_min(torch.finfo(total.dtype).tiny).unsqueeze(-1)


@lru_cache(maxsize=16)
def plan_shares(layout: Layout) -> list[_Share]:
    """Which slots each query's blocks and tail are in. Checks the layout, and the depth of its trees."""
    check_layout(layout)
    shares: list[_Share] = []
    for b, prefix in enumerate(layout.prefix_lens):
        first, last = layout.query_start[b], layout.query_start[b + 1]
        if first == last:
            continue
        length = prefix + last - first
        physical = _physical_slots(layout.block_tables[b][: -(-length // layout.page)], layout.page, length)
        visible = visible_slots(layout, first, last, prefix)
        seen = visible.sum(1)
        blocks = (seen - LAG).clamp_min(0) // SPAN
        # Slots of the visible keys in order: stable, so that they come first and rise.
        order = torch.argsort(visible.logical_not().to(torch.uint8), dim=1, stable=True)
        shared = int(blocks.max()) * SPAN
        inside = torch.arange(shared) < (blocks * SPAN).unsqueeze(1)
        if bool((inside & (order[:, :shared] != torch.arange(shared))).any()):
            raise ValueError(
                f"tree_mask: the tree of sequence {b} is deeper than the {LAG} nodes below its root that fit"
            )
        place = blocks.unsqueeze(1) * SPAN + torch.arange(TAIL)
        in_tail = place < seen.unsqueeze(1)
        tail = physical[order.gather(1, torch.minimum(place, (seen - 1).clamp_min(0).unsqueeze(1)))]
        for low in range(0, last - first, AT_ONCE):
            rows = slice(low, min(low + AT_ONCE, last - first))
            shared_slots = physical[: int(blocks[rows].max()) * SPAN]
            shares.append(
                _Share(first + rows.start, first + rows.stop, shared_slots, blocks[rows], tail[rows], in_tail[rows])
            )
    return shares


def _physical_slots(blocks: tuple[int, ...], page: int, length: int) -> Tensor:
    starts = torch.tensor(blocks, dtype=torch.int64) * page
    return (starts.unsqueeze(1) + torch.arange(page)).flatten()[:length]


def _shape(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


_tree_attention_exact = register(
    "tree_attention_exact(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_start,"
    " Tensor prefix_lens, Tensor? tree_mask, float scale) -> Tensor",
    tree_attention_exact_twin,
    "exact_attention.tree_attention_exact",
    _shape,
)
