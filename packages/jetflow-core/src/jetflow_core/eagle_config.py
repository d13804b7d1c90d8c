"""The configuration of an EAGLE-3-style draft head, in a layout of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jetflow_core.config_fields import Fields, check_positive, located
from jetflow_core.head_config import DraftConfig, decoder_from_hf
from jetflow_core.model_config import refuse_unsupported

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


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DraftConfig):
    """An autoregressive head of one decoder layer.

    It drafts `depth` tokens deep with a pass a depth, in which the `expanded` best nodes of the level before get children.
    """

    num_layers: int = 1
    depth: int
    expanded: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(depth=self.depth, expanded=self.expanded)
        if self.num_layers != 1:
            raise ValueError(f"num_hidden_layers = {self.num_layers}: an EAGLE head has one layer")

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
        with located(source):
            return cls(
                **decoder_from_hf(fields),
                depth=own.integer("depth"),
                expanded=own.integer("expanded"),
                target_layer_ids=own.integers("target_layer_ids"),
                num_target_layers=own.integer("num_target_layers"),
                target_hidden_size=own.integer("target_hidden_size"),
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
            **self.decoder_to_hf(),
            "hidden_act": "silu",
            "dtype": "bfloat16",
        }
