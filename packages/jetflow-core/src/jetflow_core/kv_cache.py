"""Pages as tensors: one tensor holds the keys and values of every layer."""

from __future__ import annotations

import os

import torch
from torch import Tensor

import jetflow_triton as ops


class KVCache:
    """`pages` [layers, 2, blocks, page, Hk, D]: keys and values of all layers, addressed by block tables.

    Memory is not cleared: no slot is read before it has been written. Raises ValueError where there is not enough of it.
    """

    def __init__(
        self, layers: int, blocks: int, page: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = layers, 2, blocks, page, heads, head_dim
        try:
            self.pages = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # also of a size that no integer holds
            size = blocks * page * self.bytes_per_slot(layers, heads, head_dim, dtype) / 2**30
            raise ValueError(
                f"{blocks} pages of {page} tokens take {size:,.1f} GiB, which cannot be had here: lower num_pages, page_size or "
                "cache_gib"
            ) from error
        self.layers = [(keys, values) for keys, values in self.pages]

    @staticmethod
    def bytes_per_slot(layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Memory of one token's keys and values over all layers."""
        return layers * 2 * heads * head_dim * dtype.itemsize

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k and v [T, Hk, D] of `layer` at physical `slots` [T]."""
        keys, values = self.layers[layer]
        ops.kv_write(k, v, keys, values, slots)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy physical slots `source` [M] to `target` [M] in every layer; the two may overlap."""
        ops.kv_move(self.pages, source, target)


def free_memory(device: torch.device) -> int:
    """Bytes a cache may take of what is free on `device` now: four fifths of a GPU's, a quarter of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 4 // 5
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return 2**31  # where the system does not tell
