"""Shapes of targets and draft heads as the roofline counts them, from configurations or by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jetflow_triton.roofline import QWEN3_8B, QWEN3_30B_A3B, Load, Model
from jetflow_triton.roofline.costs import ITEM, ROWS, matrices

if TYPE_CHECKING:
    from jetflow_core.config import HeadConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class HeadShape:
    """A parallel draft head.

    `layers`: its decoder layers, whose `vocab` is the draft vocabulary. `block`: slots of a block, the anchor's among them.
    `taps`: width of a token's concatenated target taps. `pairwise`: inner width of the pairwise conditioning, 0 without it.
    """

    layers: Model
    block: int
    taps: int
    pairwise: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A target and its head (None: nothing to run for a draft).

    `stacks`: the target's dense layers and its sparse ones, each as a model of its own; what is not in layers is that of the
    first. `tables`: embeddings and LM head, which are one where they are tied.
    """

    name: str
    stacks: tuple[Model, ...]
    head: HeadShape | None
    tables: int = 2

    @property
    def weight_bytes(self) -> float:
        """Of target and head in a two-byte dtype; the head shares the target's tables."""
        parameters = self.tables * self.stacks[0].vocab * self.stacks[0].hidden
        parameters += sum(_layer_parameters(model) * model.layers for model in self.stacks)
        if self.head is not None:
            layers = self.head.layers
            parameters += self.head.taps * layers.hidden + _layer_parameters(layers) * layers.layers
            parameters += self.head.pairwise * (5 * layers.hidden + 3 * layers.vocab)  # the MLP, and its tables
        return parameters * ITEM

    def cache_bytes(self, load: Load) -> float:
        """Of the target's and the head's keys and values in a two-byte dtype."""
        models = [*self.stacks, *([] if self.head is None else [self.head.layers])]
        slot = sum(model.layers * 2 * model.kv_heads * model.width for model in models) * ITEM
        return load.batch * (load.context + load.budget) * slot


def shape_of(config: ModelConfig, head: HeadConfig | None, name: str) -> Shape:
    """The shape of a target and its head. Raises ValueError where they do not belong together or attention has no tile."""
    if config.num_heads // config.num_kv_heads > ROWS:
        raise ValueError(
            f"{name} has {config.num_heads // config.num_kv_heads} query heads a KV head; the model of attention ends at {ROWS}"
        )
    sparse = sum(config.is_sparse(layer) for layer in range(config.num_layers))
    dense = replace(_model(config, name), layers=config.num_layers - sparse)
    experts = replace(
        dense,
        layers=sparse,
        inner=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
    )
    stacks = tuple(stack for stack in (dense, experts) if stack.layers)
    if head is not None and (head.target_hidden_size, head.hidden_size) != (config.hidden_size, config.hidden_size):
        raise ValueError(
            f"the draft head is for a target of hidden size {head.target_hidden_size} and has {head.hidden_size} itself, "
            f"{name} has {config.hidden_size}: they do not belong together"
        )
    return Shape(name, stacks, None if head is None else head_shape(head), 1 if config.tie_word_embeddings else 2)


def head_shape(config: HeadConfig) -> HeadShape:
    """The shape of a head's configuration."""
    layers = replace(_model(config, "head"), vocab=config.draft_vocab_size or config.vocab_size)
    taps = len(config.target_layer_ids) * config.target_hidden_size
    return HeadShape(layers, config.block_size, taps, config.pairwise_size)


def _model(config: ModelConfig | HeadConfig, name: str) -> Model:
    """A decoder whose layers are all dense, with the configuration's sizes."""
    return Model(
        name=name,
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        width=config.head_dim,
        inner=config.intermediate_size,
        vocab=config.vocab_size,
    )


# The layers, block and taps of the public DFlash and JetSpec heads, with the pairwise conditioning of the demo head.
_HEAD_8B = HeadShape(Model("head", 4096, 5, 32, 8, 128, 12288, 151936), 16, 5 * 4096, 256)
_HEAD_30B_A3B = HeadShape(Model("head", 2048, 8, 32, 4, 128, 6144, 151936), 16, 5 * 2048, 256)
SHAPES = {
    "qwen3-8b": Shape("Qwen3-8B", (QWEN3_8B,), _HEAD_8B),
    "qwen3-30b-a3b": Shape("Qwen3-30B-A3B", (QWEN3_30B_A3B,), _HEAD_30B_A3B),
}


def named_shape(name: str, head: str | None) -> Shape:
    """The shape called `name`, with the head in the folder `head` instead of its own. Raises ValueError."""
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}: use {', '.join(SHAPES)}, or --model with a checkpoint")
    shape = SHAPES[name]
    if head is None:
        return shape
    config = _read_head(head)
    if config.target_hidden_size != shape.stacks[0].hidden:
        raise ValueError(
            f"draft head {head} is for a target of hidden size {config.target_hidden_size}, {shape.name} has "
            f"{shape.stacks[0].hidden}"
        )
    return replace(shape, head=head_shape(config))


def read_shape(model: str, head: str | None, name: str) -> Shape:
    """The shape of a checkpoint and its head, whose weights are not read. Raises ValueError as opening them does."""
    from jetflow_core.weights import open_checkpoint  # noqa: PLC0415 - reads checkpoints, which most shapes need not

    return shape_of(open_checkpoint(model).config, None if head is None else _read_head(head), name)


def _read_head(head: str) -> HeadConfig:
    """The configuration of a parallel head. Raises ValueError as opening it does, and for a head of another kind."""
    from jetflow_core.weights import head_folder, open_head  # noqa: PLC0415

    if "eagle_config" in head_folder(head)[1]:
        raise ValueError(
            f"{head} is an EAGLE head, which drafts with a pass a depth; the step model knows parallel heads only: name another"
        )
    return open_head(head)[0]


def _layer_parameters(model: Model) -> int:
    shapes = matrices(model)
    parameters = sum(out * width for name, (out, width) in shapes.items() if name != "head")
    return parameters + 3 * model.experts * model.inner * model.hidden
