"""Writing and moving entries of a paged K/V cache."""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow_triton.checks import INT64, check_devices, check_indices, check_rows, check_values, debugging
from jetflow_triton.dispatch import register, uses_op


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Stores each token's K and V at its slot: `cache[slot // page, slot % page] = value`.

    Args:
        k: `[T, Hk, D]`, last dimension contiguous. `v` likewise.
        k_cache: `[blocks, page, Hk, D]` contiguous, of any float dtype (values are cast). `v_cache` likewise.
        slots: `[T]` int64; −1 skips the token. No slot may occur twice.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or stride does not fit, or (checked on the CPU) a slot is out of range.
    """
    _check_write(k, v, k_cache, v_cache, slots)
    if debugging():
        check_values("slots", slots, -1, k_cache.shape[0] * k_cache.shape[1] - 1)
    (_kv_write if uses_op(k) else kv_write_twin)(k, v, k_cache, v_cache, slots)


def kv_move(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copies slot `source[i]` to slot `target[i]` in every layer, K and V, as if all were read before any is written.

    Args:
        kv: `[layers, 2, blocks, page, Hk, D]`, contiguous.
        source: `[M]` int64 slots. May overlap `target` in any way.
        target: `[M]` int64 slots; −1 skips the move. No slot may occur twice.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or stride does not fit, or (checked on the CPU) a slot is out of range.
    """
    _check_move(kv, source, target)
    if debugging():
        _check_moves(kv, source, target)
    (_kv_move if uses_op(kv) else kv_move_twin)(kv, source, target)


def kv_write_twin(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Plain-torch `kv_write`."""
    if not slots.numel():
        return
    k_flat, v_flat = k_cache.view(-1, *k.shape[1:]), v_cache.view(-1, *v.shape[1:])
    least = check_values("slots", slots, -1, k_flat.shape[0] - 1)
    if least < 0:
        kept = torch.nonzero(slots >= 0).squeeze(1)
        slots, k, v = slots[kept], k[kept], v[kept]
    k_flat.index_copy_(0, slots, k if k.dtype is k_cache.dtype else k.to(k_cache.dtype))
    v_flat.index_copy_(0, slots, v if v.dtype is v_cache.dtype else v.to(v_cache.dtype))


def kv_move_twin(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Plain-torch `kv_move`: gather everything, then scatter."""
    source, target = _check_moves(kv, source, target)
    if source.numel():
        flat = kv.view(kv.shape[0], 2, -1, *kv.shape[4:])
        flat.index_copy_(2, target, flat.index_select(2, source))


def _check_moves(kv: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The moves that are not skipped, all within the cache."""
    last = kv.shape[2] * kv.shape[3] - 1
    if check_values("target", target, -1, last) < 0:
        kept = torch.nonzero(target >= 0).squeeze(1)
        source, target = source[kept], target[kept]
    check_values("source", source, 0, last)
    return source, target


def _check_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    check_rows("k", k, 3)
    check_rows("v", v, 3)
    check_rows("k_cache", k_cache, 4)
    check_rows("v_cache", v_cache, 4)
    check_indices("slots", slots, 1, INT64)
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, k has {tuple(k.shape)}: they must be equal")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache has shape {tuple(v_cache.shape)}, k_cache has {tuple(k_cache.shape)}")
    if k_cache.shape[2:] != k.shape[1:]:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}: [blocks, page, *{tuple(k.shape[1:])}] is needed")
    if slots.shape[0] != k.shape[0]:
        raise ValueError(f"slots has {slots.shape[0]} entries for {k.shape[0]} tokens")
    check_devices(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous: pass whole layers of the cache")
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("k and v need a contiguous last dimension: call .contiguous() on them")


def _check_move(kv: Tensor, source: Tensor, target: Tensor) -> None:
    check_rows("kv", kv, 6)
    if kv.shape[1] != 2 or not kv.is_contiguous():
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}: contiguous [layers, 2, blocks, page, heads, width] is needed"
        )
    for name, slots in (("source", source), ("target", target)):
        check_indices(name, slots, 1, INT64)
    if source.shape != target.shape:
        raise ValueError(f"source has {source.shape[0]} entries, target has {target.shape[0]}")
    check_devices(kv=kv, source=source, target=target)


def _nothing(*_: object) -> None:
    """The ops change their argument and return nothing."""


_kv_write = register(
    "kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()",
    kv_write_twin,
    "kv.kv_write",
    _nothing,
)
_kv_move = register("kv_move(Tensor(a!) kv, Tensor source, Tensor target) -> ()", kv_move_twin, "kv.kv_move", _nothing)
