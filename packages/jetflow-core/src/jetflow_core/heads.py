"""The kinds of draft heads: which one a folder holds, and the drafter that goes with it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from jetflow_core.config_fields import Fields
from jetflow_core.drafter import Drafter, HeadDrafter
from jetflow_core.eagle import EagleHead
from jetflow_core.eagle_config import ARCHITECTURE
from jetflow_core.eagle_drafter import EagleDrafter
from jetflow_core.head import DraftHead
from jetflow_core.kv_cache import KVCache
from jetflow_core.second_pass import scratch_slots
from jetflow_core.step_clock import StepClock
from jetflow_core.weights import CheckpointError, head_folder

Head = DraftHead | EagleHead


def load_head(path: str | Path, embed: Tensor, lm_head: Tensor) -> Head:
    """Read a head folder (or hub id) of any kind for the target whose tables [V, C] are given, in their dtype and device.

    Raises ValueError (CheckpointError for files) naming what is wrong.
    """
    folder, data = head_folder(path)
    source = str(folder / "config.json")
    try:
        names = Fields(data, source).strings("architectures", ())
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if ARCHITECTURE in names:
        return EagleHead.load(folder, embed, lm_head)
    if foreign := [name for name in names if "eagle" in name.lower()]:
        raise CheckpointError(
            f"{source}: architectures = {foreign[0]!r}: EAGLE heads of other makers are not supported, since they bring an "
            "LM head of their own; train one with `jetflow-train head --kind eagle`"
        )
    return DraftHead.load(folder, embed, lm_head)


def head_drafter(
    head: Head,
    num_blocks: int,
    page: int,
    width: int,
    clock: StepClock | None = None,
    passes: int = 1,
    expanded: int | None = None,
) -> Drafter:
    """The drafter of `head` with `num_blocks` pages of `page` tokens; see its class for the rest.

    Raises ValueError for two passes of a head that has but one, and for `expanded` of one whose tree has no levels.
    """
    if isinstance(head, EagleHead):
        if passes == 2:
            raise ValueError(
                "draft_passes is 2, but an EAGLE head makes a pass for every level of its tree: use draft_passes 1, or a JetFlow "
                "head, best one trained with `jetflow-train head --prefix`"
            )
        return EagleDrafter(head, num_blocks, page, width, clock, expanded)
    if expanded is not None:
        raise ValueError(
            f"draft_width is {expanded}, but only an EAGLE head's tree grows level by level: leave it out, or lower candidates"
        )
    return HeadDrafter(head, num_blocks, page, width, clock, passes)


def drafting_slots(head: Head, passes: int = 1) -> int:
    """Slots from the anchor on that the drafter of `head` writes."""
    return head.config.tree_slots if isinstance(head, EagleHead) else scratch_slots(head.config, passes)


def context_bytes_per_slot(head: Head, dtype: torch.dtype) -> int:
    """Memory that the drafter of `head` keeps for one token."""
    if isinstance(head, EagleHead):
        return EagleDrafter.bytes_per_slot(head.config, dtype)
    config = head.config
    return KVCache.bytes_per_slot(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
