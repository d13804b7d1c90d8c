"""Which token follows: seeded sampling of every row at once, and the acceptance walk over the draft trees.

Both run on the device, so that a step reads back only the accepted paths and one token a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetflow_triton.checks import (
    INT32,
    INT64,
    INTEGER,
    check_devices,
    check_indices,
    check_rows,
    check_values,
    debugging,
)
from jetflow_triton.dispatch import register, uses_op


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token a row, a function of that row's logits, parameters, seed and position alone.

    Gumbel-max: the largest `logit / temperature + noise` draws from the softmax. The noise is a hash of (seed, position,
    token), so text does not depend on the batch, on the budget or on step borders. Filters apply after the temperature:
    top-k (all that equal the k-th stay), then top-p within that (a token stays while those more probable hold less than
    `top_p`), then min-p (relative to the largest). Penalties and bias belong in the logits.

    Args:
        logits: `[T, V]`, last dimension contiguous.
        temperature: `[T]` floating point; 0 takes the largest logit, the lowest id of equals.
        top_k: `[T]` int32 or int64; 0 is off.
        top_p: `[T]` floating point in (0, 1]; 1 is off.
        min_p: `[T]` floating point in [0, 1]; 0 is off.
        seeds: `[T]` int64; an unsigned one is wrapped around by the caller.
        positions: `[T]` int32 or int64: the absolute position that the token will have.

    Returns:
        `[T]` int64. −1 for a row with a NaN or +inf, or with nothing above −inf.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, stride or device does not fit.

    Example:
        >>> logits, ones = torch.randn(3, 1000), torch.ones(3)
        >>> seeds, positions, top_k = torch.tensor([7, 7, 8]), torch.tensor([20, 21, 20]), torch.tensor([0, 50, 0])
        >>> tokens = sample(logits, 0.8 * ones, top_k, 0.95 * ones, 0 * ones, seeds, positions)
        >>> tokens.shape, bool((tokens == sample(logits, 0.8 * ones, top_k, 0.95 * ones, 0 * ones, seeds, positions)).all())
        (torch.Size([3]), True)
    """
    _check_sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
    run = _sample if uses_op(logits) else sample_twin
    return run(logits, temperature, top_k, top_p, min_p, seeds, positions)


def accept_walk(
    tokens: Tensor, parents: Tensor, query_start: Tensor, choices: Tensor, max_depth: int
) -> tuple[Tensor, ...]:
    """Walks every tree from its root along the target's own choices, as far as they were drafted.

    At a node the target's choice is looked up among the children. While it is there the walk goes on; the first choice
    that is not becomes the bonus token. The new tokens of a sequence are those of its path after the root, then the
    bonus: exactly what step-by-step decoding would give.

    Args:
        tokens: `[T]` int32 or int64, the trees' tokens side by side; no two siblings share one.
        parents: `[T]` int32 or int64, relative to the tree; −1 at its first node, the root. Parents precede children.
        query_start: `[B + 1]` int32, rising from 0 to T.
        choices: `[T]` int64, the target's token after each node; −1 (no choice) ends a walk.
        max_depth: levels below the root that are walked at most; the depth of the deepest tree or more.

    Returns:
        Path `[B, max_depth + 1]` int64 (nodes relative to the tree, −1 behind its end), its lengths `[B]` int64, and the
        bonus tokens `[B]` int64. An empty tree has length 0 and bonus −1.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device or `max_depth` does not fit, or (checked on the CPU) `query_start` does not rise so.

    Example:
        >>> tokens, parents = torch.tensor([5, 6, 7, 8]), torch.tensor([-1, 0, 0, 2])  # 5 -> 6, 5 -> 7 -> 8
        >>> starts, choices = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([7, 1, 8, 9])
        >>> path, lengths, bonus = accept_walk(tokens, parents, starts, choices, max_depth=3)
        >>> path.tolist(), lengths.tolist(), bonus.tolist()
        ([[0, 2, 3, -1]], [3], [9])
    """
    _check_walk(tokens, parents, query_start, choices, max_depth)
    if debugging():
        _check_trees(parents, query_start)
    run = _accept_walk if uses_op(tokens) else accept_walk_twin
    return run(tokens, parents, query_start, choices, max_depth)


def accept_walk_twin(
    tokens: Tensor, parents: Tensor, query_start: Tensor, choices: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain-torch `accept_walk`: a level of all trees at a time."""
    _check_trees(parents, query_start)
    start = query_start[:-1].long()
    sizes = query_start.diff()
    tree = torch.arange(len(sizes)).repeat_interleave(sizes)
    path = tokens.new_full((len(sizes), max_depth + 1), -1, dtype=torch.int64)
    lengths, bonus = path.new_zeros(len(sizes)), path.new_full((len(sizes),), -1)
    walking = sizes.nonzero().squeeze(1)
    node = torch.zeros_like(start)
    for level in range(max_depth + 1):
        path[walking, level] = node[walking]
        lengths[walking] = level + 1
        bonus[walking] = choices[(start + node)[walking]]
        on = torch.zeros_like(sizes, dtype=torch.bool).index_fill_(0, walking, True)
        row = (on[tree] & (parents == node[tree]) & (tokens == bonus[tree])).nonzero().squeeze(1)
        if not len(row):
            break
        walking = tree[row]
        node[walking] = row - start[walking]
    return path, lengths, bonus


def greedy(logits: Tensor) -> Tensor:
    """What `sample` takes at temperature 0, on any device: `[T, V]` -> `[T]` int64, −1 for a row with nothing to choose."""
    best, chosen = logits.max(dim=-1)  # several times faster than argmax, and also the first of equals
    return torch.where(best.isfinite(), chosen, -1)  # torch ranks NaN above everything


LOGITS_AT_ONCE = 2**16  # what a CPU core's cache holds


def sample_twin(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Plain-torch `sample`, some rows at a time."""
    chosen = greedy(logits)
    sampled = (temperature > 0).nonzero().squeeze(1)
    if not len(sampled):
        return chosen
    columns = (temperature.float().clamp_min(_TINY), top_k.long(), top_p.double(), log_min_p(min_p))
    keys = noise_keys(seeds, positions)
    token_steps = (torch.arange(logits.shape[1]) + 1) * GOLDEN
    for rows in sampled.split(max(1, LOGITS_AT_ONCE // logits.shape[1])):
        filters = _Filters(*(column[rows, None] for column in columns))
        # Gumbel noise is −log of an exponential variable.
        scores = filters.apply(logits[rows].float()) - _log_exponential(keys[rows, None] + token_steps)
        chosen[rows] = torch.where(chosen[rows] < 0, -1, scores.argmax(-1))
    return chosen


_TINY = torch.finfo(torch.float32).tiny
_NUCLEUS_HEAD = 1024


@dataclass(frozen=True, slots=True)
class _Filters:
    """Parameters of some rows, `[n, 1]` each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """float32 `[n, V]` at the rows' temperatures, the largest 0, −inf for what the filters exclude."""
        # The largest becomes 0 before the division, so that no temperature, however small, overflows.
        scaled = (logits - logits.amax(-1, keepdim=True)).div_(self.temperature)
        top_k = self.top_k.clamp(max=scaled.shape[1])
        if largest := int(top_k.max()):
            kth = scaled.topk(largest).values.gather(1, (top_k - 1).clamp_min(0))
            scaled = scaled.masked_fill((scaled < kth) & (top_k > 0), -torch.inf)
        if bool((self.top_p < 1).any()):
            probs = scaled.softmax(-1)
            scaled = scaled.masked_fill((probs < _nucleus_floor(probs, self.top_p)) & (self.top_p < 1), -torch.inf)
        if bool((self.log_min_p > -torch.inf).any()):
            scaled = scaled.masked_fill(scaled < self.log_min_p, -torch.inf)
        return scaled


def _nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """Probability of the last token of the nucleus, `[n, V]`, `[n, 1]` -> `[n, 1]`."""
    # Few tokens hold top_p of the mass in nearly every row: the whole vocabulary is sorted only where they do not.
    head = probs.topk(min(_NUCLEUS_HEAD, probs.shape[1])).values.double()
    floor = _last_within(head, top_p)
    wide = (head.sum(-1) < top_p.squeeze(-1)).nonzero().squeeze(-1)
    if len(wide):
        floor[wide] = _last_within(probs[wide].sort(dim=-1, descending=True).values.double(), top_p[wide])
    return floor


def _last_within(ordered: Tensor, top_p: Tensor) -> Tensor:
    """Last of the descending probabilities with less than `top_p` before it, `[n, k]` -> `[n, 1]` float32."""
    before = ordered.cumsum(-1) - ordered
    last = (before < top_p).sum(-1, keepdim=True) - 1
    return ordered.gather(1, last.clamp_min(0)).float()


def log_min_p(min_p: Tensor) -> Tensor:
    """What `min_p` means for logits whose largest is 0, float32."""
    return min_p.double().log().float()


GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Step of the counters, as int64."""


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """A hash of (seed, position) a row, int64: where the row's counters start."""
    return _mix(_mix(seeds) + (positions.long() + 1) * GOLDEN)


def _log_exponential(counter: Tensor) -> Tensor:
    """Log of a standard exponential variable per int64 counter, float32: a pure function, element by element."""
    # Small uniforms make the winners (log1p(−u) ≈ −u), and floats are finest there. Never 0, never 1.
    uniform = _mix(counter).float().abs_().mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64, whose products wrap around."""
    x = (x ^ _shift_right(x, 30)).mul_(0xBF58476D1CE4E5B9 - 2**64)
    x ^= _shift_right(x, 27)
    x *= 0x94D049BB133111EB - 2**64
    x ^= _shift_right(x, 31)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift that fills with zeros (torch's own repeats the sign)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _check_sample(logits: Tensor, *columns: Tensor) -> None:
    check_rows("logits", logits, 2)
    if logits.stride(1) != 1:
        raise ValueError("logits needs a contiguous last dimension: call .contiguous() on it")
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    integer = {"top_k": INTEGER, "seeds": INT64, "positions": INTEGER}
    for name, column in zip(names, columns, strict=True):
        if name in integer:
            check_indices(name, column, 1, integer[name])
        elif not column.is_floating_point():
            raise TypeError(f"{name} is {column.dtype}: a floating-point tensor is needed")
        if column.shape != logits.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(column.shape)}: [{logits.shape[0]}] is needed to match logits")
        check_devices(logits=logits, **{name: column})


def _check_walk(tokens: Tensor, parents: Tensor, query_start: Tensor, choices: Tensor, max_depth: int) -> None:
    check_indices("tokens", tokens, 1, INTEGER)
    check_indices("parents", parents, 1, INTEGER)
    check_indices("query_start", query_start, 1, INT32)
    check_indices("choices", choices, 1, INT64)
    for name, flat in (("parents", parents), ("choices", choices)):
        if flat.shape != tokens.shape:
            raise ValueError(f"{name} has {flat.shape[0]} entries for {tokens.shape[0]} tokens")
    if not query_start.shape[0]:
        raise ValueError("query_start is empty: [B + 1] entries are needed, a 0 for no trees")
    check_devices(tokens=tokens, parents=parents, query_start=query_start, choices=choices)
    if max_depth < 0:
        raise ValueError(f"max_depth is {max_depth}: 0 or more levels can be walked")


def _check_trees(parents: Tensor, query_start: Tensor) -> None:
    starts, rows = query_start.tolist(), parents.shape[0]
    if starts[0] != 0 or starts[-1] != rows or sorted(starts) != starts:
        raise ValueError(f"query_start is {starts}: it must rise from 0 to the {rows} tokens")
    check_values("parents", parents, -1, rows - 1)


def _sample_shape(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _walk_shape(
    tokens: Tensor, parents: Tensor, query_start: Tensor, choices: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch = query_start.shape[0] - 1
    shapes = ((batch, max_depth + 1), (batch,), (batch,))
    path, lengths, bonus = (tokens.new_empty(shape, dtype=torch.int64) for shape in shapes)
    return path, lengths, bonus


_sample = register(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions)"
    " -> Tensor",
    sample_twin,
    "choice.sample",
    _sample_shape,
)
_accept_walk = register(
    "accept_walk(Tensor tokens, Tensor parents, Tensor query_start, Tensor choices, int max_depth)"
    " -> (Tensor, Tensor, Tensor)",
    accept_walk_twin,
    "choice.accept_walk",
    _walk_shape,
)
