"""The configuration of an EAGLE-3-style draft head, in a layout of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jetflow_core.config_fields import Fields, check_positive, located
from jetflow_core.head_config import check_draft_temperature, check_draft_vocab, check_taps
from jetflow_core.model_config import check_decoder, refuse_unsupported
from jetflow_core.rope_config import RopeConfig

ARCHITECTURE = "EagleDraftModel"
KEYS = frozenset(
    {
        "depth",
        "expanded",
        "target_layer_ids",
        "num_target_layers",
        "target_hidden_size",
        "draft_vocab_size",
        "draft_temperature",
    }
)


@dataclass(frozen=True)
class EagleConfig:
    """An autoregressive head of one decoder layer, with its link to the target.

    It drafts `depth` tokens deep with a pass a depth, in which the `expanded` best nodes of the level before get children.
    `target_layer_ids` are tapped target layers (a tap is the *output* of that layer).

    Raises `ValueError` naming the key and the value of an impossible setting.
    """

    depth: int
    expanded: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
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
        check_positive(depth=self.depth, expanded=self.expanded, target_hidden_size=self.target_hidden_size)
        check_draft_temperature(self.draft_temperature)
        check_taps(self.target_layer_ids, self.num_target_layers)
        check_draft_vocab(self.draft_vocab_size, self.vocab_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return 1

    @property
    def block_size(self) -> int:
        """The anchor and the drafted depths, as of a head that drafts all of them at once."""
        return self.depth + 1

    @property
    def tree_slots(self) -> int:
        """Nodes, the anchor included, that go through the head for one tree at most."""
        return 1 + (self.depth - 1) * self.expanded

    @classmethod
    def from_hf(cls, data: Mapping[str, object], source: str) -> EagleConfig:
        """Parse a head's `config.json` as `to_hf` writes it.

        Raises:
            ValueError: naming file, key and value, for anything missing, impossible or not supported.
        """
        fields = Fields(data, source)
        refuse_unsupported(fields, windowed_by_default=False)
        own = fields.object("eagle_config")
        for key in own.data:
            if key not in KEYS:
                raise own.error(key, f"unknown; known are {', '.join(sorted(KEYS))}")
        if fields.integer("num_hidden_layers") != 1:
            raise fields.error("num_hidden_layers", "an EAGLE head has one layer")
        positions = fields.integer("max_position_embeddings")
        with located(source):
            return cls(
                depth=own.integer("depth"),
                expanded=own.integer("expanded"),
                target_layer_ids=own.integers("target_layer_ids"),
                num_target_layers=own.integer("num_target_layers"),
                target_hidden_size=own.integer("target_hidden_size"),
                vocab_size=fields.integer("vocab_size"),
                hidden_size=fields.integer("hidden_size"),
                intermediate_size=fields.integer("intermediate_size"),
                num_heads=fields.integer("num_attention_heads"),
                num_kv_heads=fields.integer("num_key_value_heads"),
                head_dim=fields.integer("head_dim"),
                max_position_embeddings=positions,
                rms_norm_eps=fields.number("rms_norm_eps"),
                rope=RopeConfig.from_hf(fields, positions),
                draft_vocab_size=own.maybe_integer("draft_vocab_size"),
                draft_temperature=own.number("draft_temperature", 1.0),
            )

    def to_hf(self) -> dict[str, object]:
        """The `config.json` object: the decoder's usual keys, and our own settings under `eagle_config`."""
        return {
            "architectures": [ARCHITECTURE],
            "eagle_config": {
                "depth": self.depth,
                "expanded": self.expanded,
                "target_layer_ids": list(self.target_layer_ids),
                "num_target_layers": self.num_target_layers,
                "target_hidden_size": self.target_hidden_size,
                "draft_vocab_size": self.draft_vocab_size,
                "draft_temperature": self.draft_temperature,
            },
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
            "hidden_act": "silu",
            "dtype": "bfloat16",
        }
