"""Rotary embedding settings and their two spellings in Hugging Face files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jetflow_core.config_fields import Fields

# The keys each kind of scaling reads. Anything else is refused: a dropped scaling key ruins long contexts silently.
_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
        }
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and optional long-context scaling (`type`: "default", "linear", "yarn" or "llama3")."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.type not in _KEYS:
            raise ValueError(f"rope_type = {self.type!r}: supported are {', '.join(_KEYS)}")
        if not self.theta > 0:
            raise ValueError(f"rope_theta = {self.theta}: must be positive")
        if not self.factor >= 1:
            raise ValueError(f"factor = {self.factor}: a rope scaling factor is at least 1")
        if self.type in ("yarn", "llama3") and not (self.original_max_position_embeddings or 0) > 0:
            raise ValueError(
                f"original_max_position_embeddings = {self.original_max_position_embeddings}: "
                f"rope_type {self.type} needs a positive one"
            )
        if self.type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor}, high_freq_factor = {self.high_freq_factor}: "
                "need 0 < low < high"
            )
        if self.type == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(f"beta_slow = {self.beta_slow}, beta_fast = {self.beta_fast}: need 0 < slow <= fast")

    def to_hf(self) -> dict[str, object]:
        """Both spellings of these settings as `config.json` keys."""
        scaling: dict[str, object] = {"rope_type": self.type}
        for key in sorted(_KEYS[self.type]):
            if getattr(self, key) is not None:
                scaling[key] = getattr(self, key)
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.type == "default" else scaling,
            "rope_parameters": {**scaling, "rope_theta": self.theta},
        }

    @classmethod
    def from_hf(cls, fields: Fields, max_position_embeddings: int) -> RopeConfig:
        """Read `rope_parameters`, or `rope_theta` with `rope_scaling`; both may be there when they agree.

        Args:
            fields: the `config.json` object.
            max_position_embeddings: YaRN's original context length where the file gives none, as in `transformers`.
        """
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "partial rotary embeddings are not supported")
        theta = fields.number("rope_theta", 10000.0)
        spellings = [
            (key, _parse(fields.object(key), theta, max_position_embeddings))
            for key in ("rope_parameters", "rope_scaling")
            if fields.has(key)
        ]
        if not spellings:
            return _build(fields, theta=theta)
        (first, rope), (last, other) = spellings[0], spellings[-1]
        if other != rope:
            raise ValueError(f"{fields.source}: {first} contradicts {last}: {rope} against {other}; keep one")
        if fields.has("rope_theta") and rope.theta != theta:
            raise fields.error(
                "rope_theta",
                f"contradicts {first}.rope_theta = {rope.theta}; make them equal",
            )
        return rope


def _build(fields: Fields, **values: Any) -> RopeConfig:
    """Construct, putting the file's name before a complaint."""
    try:
        return RopeConfig(**values)
    except ValueError as error:
        raise ValueError(f"{fields.source}: {fields.prefix}{error}") from None


def _parse(fields: Fields, theta: float, max_position_embeddings: int) -> RopeConfig:
    kind = fields.string("rope_type", fields.string("type", "default"))
    if kind not in _KEYS:
        raise fields.error(
            "rope_type" if fields.has("rope_type") else "type",
            f"supported are {', '.join(_KEYS)}",
        )
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "partial rotary embeddings are not supported")
    # A factor beside rope_type "default" is legal and without effect in Hugging Face files.
    known = frozenset[str]().union(*_KEYS.values()) if kind == "default" else _KEYS[kind]
    for key in fields.data:
        if fields.has(key) and key not in known | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}:
            raise fields.error(key, f"not a setting of rope_type {kind}")
    values: dict[str, object] = {
        "theta": fields.number("rope_theta", theta),
        "type": kind,
    }
    for key in _KEYS[kind]:
        if key == "original_max_position_embeddings":
            fallback = max_position_embeddings if kind == "yarn" else None
            values[key] = fields.integer(key, fallback)
        elif key == "truncate":
            values[key] = fields.boolean(key, True)
        elif fields.has(key) or key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
        ):
            values[key] = fields.number(key)
    return _build(fields, **values)
