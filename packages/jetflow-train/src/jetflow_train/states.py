"""How a batch of blocks goes through a head, by the head's kind: what both the loss and the measures of training are made of."""

from __future__ import annotations

from torch import Tensor

from jetflow_core.eagle import EagleHead
from jetflow_core.heads import Head
from jetflow_train.blocks import BlockBatch, block_hidden
from jetflow_train.eagle import unrolled_states


def slot_states(head: Head, batch: BlockBatch) -> tuple[Tensor, Tensor]:
    """Hidden states [J, C] of the slots with a loss, conditioned on the tokens before them and unconditioned.

    They are the same tensor for a head that knows no difference.
    """
    if isinstance(head, EagleHead):
        states = unrolled_states(head, batch)
        return states, states
    hidden = block_hidden(head, batch)[batch.slots]
    return head.condition(hidden, batch.previous, batch.before), hidden
