"""Model and head configurations: frozen, validated, parsed from Hugging Face `config.json` files."""

from jetflow_core.head_config import HeadConfig, default_tap_layers
from jetflow_core.model_config import ModelConfig
from jetflow_core.rope_config import RopeConfig

__all__ = ["HeadConfig", "ModelConfig", "RopeConfig", "default_tap_layers"]
