"""The draft head's configuration: every published checkpoint family in, one layout out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from jetflow_core.config_fields import (
    Fields,
    agreed,
    check_at_most,
    check_positive,
    located,
)
from jetflow_core.model_config import check_decoder, refuse_unsupported
from jetflow_core.rope_config import RopeConfig

CONDITIONINGS = ("none", "pairwise")
OWN_KEYS = frozenset(
    {
        "branch_conditioning",
        "pairwise_size",
        "pairwise_order",
        "draft_vocab_size",
        "learned_mask",
        "target_hidden_size",
        "draft_temperature",
    }
)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What the heads of every kind have: a decoder's shape, and the link to the target.

    `target_layer_ids` are tapped target layers (a tap is the *output* of that layer). `num_target_layers` is None where
    the file does not say (the speculators layout).

    Raises `ValueError` naming the key and the value of an impossible setting.
    """

    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary
    draft_temperature: float = 1.0  # draft log-probabilities divided by it tell how often paths are accepted

    def __post_init__(self) -> None:
        check_decoder(
            self.hidden_size,
            self.intermediate_size,
            self.num_layers,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.vocab_size,
            self.max_position_embeddings,
            self.rms_norm_eps,
        )
        check_positive(target_hidden_size=self.target_hidden_size)
        check_taps(self.target_layer_ids, self.num_target_layers)
        check_draft_temperature(self.draft_temperature)
        check_draft_vocab(self.draft_vocab_size, self.vocab_size)

    def decoder_to_hf(self) -> dict[str, object]:
        """The decoder's usual keys of `config.json`."""
        return {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            **self.rope.to_hf(),
            "max_position_embeddings": self.max_position_embeddings,
        }


def decoder_from_hf(fields: Fields) -> dict[str, Any]:
    """The fields of `DraftConfig` that the decoder's usual keys of `config.json` hold. Raises ValueError."""
    heads, positions = fields.integer("num_attention_heads"), fields.integer("max_position_embeddings")
    return {
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", 128),
        "vocab_size": fields.integer("vocab_size"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": RopeConfig.from_hf(fields, positions),
        "max_position_embeddings": positions,
    }


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DraftConfig):
    """A JetFlow draft head (`causal`) or a DFlash one (bidirectional).

    Slot k of a block with its anchor at position a predicts the token at a + k, for k in 1 … block_size − 1.
    """

    block_size: int
    mask_token_id: int
    causal: bool = True
    branch_conditioning: str = "pairwise"  # "none" | "pairwise"
    pairwise_size: int = 0  # inner width of the pairwise MLP
    pairwise_order: int = 1  # tokens back that the pairwise MLP sees: 1 or 2
    learned_mask: bool = False  # an own embedding for the mask slots instead of the target's row

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise ValueError(f"block_size = {self.block_size}: must be at least 2 (the anchor and one drafted slot)")
        check_at_most(
            "mask_token_id",
            self.mask_token_id,
            self.vocab_size - 1,
            f"vocab_size is {self.vocab_size}",
        )
        if self.branch_conditioning not in CONDITIONINGS:
            raise ValueError(
                f"branch_conditioning = {self.branch_conditioning!r}: supported are {', '.join(CONDITIONINGS)}"
            )
        if (self.branch_conditioning == "pairwise") != (self.pairwise_size > 0) or self.pairwise_size < 0:
            raise ValueError(
                f"pairwise_size = {self.pairwise_size}: must be positive with branch_conditioning "
                f"'pairwise' and 0 with 'none', which is {self.branch_conditioning!r}"
            )
        if self.pairwise_order not in (1, 2) or (self.pairwise_order == 2 and self.branch_conditioning != "pairwise"):
            raise ValueError(
                f"pairwise_order = {self.pairwise_order}: must be 1, or 2 with branch_conditioning 'pairwise', "
                f"which is {self.branch_conditioning!r}"
            )

    @classmethod
    def from_hf(cls, data: Mapping[str, object], source: str) -> HeadConfig:
        """Parse a head's `config.json`: JetSpec, DFlash, NeMo, TensorRT-Edge-LLM, speculators or our own.

        A setting spelled in several places must agree. Heads without our `jetflow_config` have no branch conditioning.

        Raises:
            ValueError: naming file, key and value, for anything missing, contradictory, impossible or not supported.
        """
        fields = Fields(data, source)
        if fields.has("transformer_layer_config"):
            fields = _from_speculators(fields)
        nested = [fields.object(name) for name in ("dflash_config", "jetspec_config") if fields.has(name)]
        if not nested:
            raise ValueError(f"{source}: not a draft head: neither dflash_config nor jetspec_config is there")
        refuse_unsupported(fields, windowed_by_default=False)
        if fields.boolean("attention_bias", False):
            raise fields.error("attention_bias", "draft heads have no attention bias")
        own = fields.object("jetflow_config")
        for key in own.data:
            if key not in OWN_KEYS:
                raise own.error(key, f"unknown; known are {', '.join(sorted(OWN_KEYS))}")
        with located(source):
            decoder = decoder_from_hf(fields)
            return cls(
                **decoder,
                block_size=_shared(fields, nested, "block_size")[0],
                mask_token_id=_shared(fields, nested, "mask_token_id")[0],
                target_layer_ids=_shared(fields, nested, "target_layer_ids"),
                num_target_layers=fields.maybe_integer("num_target_layers"),
                target_hidden_size=own.integer("target_hidden_size", decoder["hidden_size"]),
                causal=_causal(fields),
                branch_conditioning=own.string("branch_conditioning", "none"),
                pairwise_size=own.integer("pairwise_size", 0),
                pairwise_order=own.integer("pairwise_order", 1),
                draft_vocab_size=own.maybe_integer("draft_vocab_size"),
                learned_mask=own.boolean("learned_mask", False),
                draft_temperature=own.number("draft_temperature", 1.0),
            )

    def to_hf(self) -> dict[str, object]:
        """The `config.json` object: what other engines read, and our own settings under `jetflow_config`.

        Causality is written under all three names in use, since a reader that knows another one would draft
        bidirectionally with a causal head; block size and rope likewise go where each reader looks.
        """
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "is_causal": self.causal,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
                "causal_head": self.causal,
                "causal": self.causal,
            },
            "jetflow_config": {
                "branch_conditioning": self.branch_conditioning,
                "pairwise_size": self.pairwise_size,
                "pairwise_order": self.pairwise_order,
                "draft_vocab_size": self.draft_vocab_size,
                "learned_mask": self.learned_mask,
                "target_hidden_size": self.target_hidden_size,
                "draft_temperature": self.draft_temperature,
            },
            **self.decoder_to_hf(),
            "layer_types": ["full_attention"] * self.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


def check_taps(taps: tuple[int, ...], layers: int | None) -> None:
    """Raise `ValueError` unless `taps` are distinct layers in rising order of a target with `layers` of them."""
    if not taps or list(taps) != sorted(set(taps)):
        raise ValueError(f"target_layer_ids = {list(taps)}: must be distinct layers in rising order, at least one")
    if layers is not None:
        check_positive(num_target_layers=layers)
    for tap in taps:
        if tap < 0 or (layers is not None and tap >= layers):
            raise ValueError(f"target_layer_ids = {list(taps)}: {tap} is outside the target's {layers} layers")


def check_draft_vocab(size: int | None, vocab_size: int) -> None:
    """Raise `ValueError` for a draft vocabulary that is empty or larger than the target's."""
    if size is not None and not 0 < size <= vocab_size:
        raise ValueError(f"draft_vocab_size = {size}: must be in 1 … {vocab_size}")


def check_draft_temperature(temperature: float) -> None:
    """Raise `ValueError` for a temperature that scores cannot be divided by."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"draft_temperature = {temperature}: must be a finite number above 0")


def default_tap_layers(num_layers: int, k: int) -> tuple[int, ...]:
    """The usual `k` tapped layers of a target with `num_layers`: evenly spread from layer 1 to num_layers − 3.

    round(1 + i·(L−4)/(K−1)) for i in 0 … K−1, and L//2 for a single tap; raises `ValueError` where the layers
    are too few for that.
    """
    if k == 1 and num_layers >= 1:
        return (num_layers // 2,)
    if k < 1 or num_layers - 3 < k:
        raise ValueError(f"{k} taps need a target with at least {k + 3} layers, this one has {num_layers}")
    return tuple(round(1 + i * (num_layers - 4) / (k - 1)) for i in range(k))


def _shared(fields: Fields, nested: list[Fields], key: str) -> tuple[int, ...]:
    """A required setting that may stand at the top level, in a nested object, or in several places that agree."""
    places = [place for place in (fields, *nested) if place.has(key)]
    if not places:
        where = " or ".join(f"{place.prefix}{key}" for place in nested)
        raise ValueError(f"{fields.source}: the required key {where} is missing")
    values = {f"{place.prefix}{key}": place.integers(key) for place in places}
    value = cast("tuple[int, ...]", agreed(dict(values), fields.source))
    if key != "target_layer_ids" and len(value) != 1:
        raise places[0].error(key, "expected an integer")
    return value


def _causal(fields: Fields) -> bool:
    """Whether block slots see only earlier ones. The key differs by family; with none the head is DFlash's."""
    dflash, jetspec = fields.object("dflash_config"), fields.object("jetspec_config")
    places = (
        (dflash, "causal_head"),
        (dflash, "causal"),
        (jetspec, "causal_head"),
        (fields, "is_causal"),
    )
    values = {f"{place.prefix}{key}": place.boolean(key) for place, key in places if place.has(key)}
    return agreed(dict(values), fields.source) is True


def _from_speculators(fields: Fields) -> Fields:
    """The speculators layout as the common one: the decoder's keys are nested, taps count from the embedding."""
    if fields.boolean("sample_from_anchor", False):
        raise fields.error(
            "sample_from_anchor",
            "heads whose slot k predicts the token after a + k are not supported",
        )
    taps = [layer - 1 for layer in fields.integers("aux_hidden_state_layer_ids")]
    decoder = fields.object("transformer_layer_config")
    vocab_size = decoder.integer("vocab_size")
    draft_vocab_size = fields.integer("draft_vocab_size", vocab_size)
    dflash: dict[str, object] = {
        "target_layer_ids": taps,
        "mask_token_id": fields.integer("mask_token_id"),
    }
    own: dict[str, object] = {"draft_vocab_size": None if draft_vocab_size == vocab_size else draft_vocab_size}
    if fields.has("target_hidden_size"):
        own["target_hidden_size"] = fields.integer("target_hidden_size")
    top: dict[str, object] = {
        "block_size": fields.integer("block_size"),
        "is_causal": fields.data.get("is_causal"),
    }
    return Fields(
        {**decoder.data, **top, "dflash_config": dflash, "jetflow_config": own},
        fields.source,
    )
