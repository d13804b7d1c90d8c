"""The target model's configuration, parsed from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jetflow_core.config_fields import (
    Fields,
    agreed,
    check_at_most,
    check_positive,
    located,
)
from jetflow_core.rope_config import RopeConfig

ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
)
DTYPES = ("float32", "bfloat16", "float16")
MAX_POSITIONS = 1 << 24  # the rotary table has a row a position; a larger number can only be a damaged file


@dataclass(frozen=True)
class ModelConfig:
    """A Qwen3 dense, Qwen3 MoE or Llama-shaped decoder. `num_experts == 0` means dense everywhere.

    Raises `ValueError` naming the Hugging Face key and the value of an impossible setting.
    """

    architecture: str
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
    qk_norm: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architectures = {self.architecture!r}: supported are {', '.join(ARCHITECTURES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}: supported are {', '.join(DTYPES)}")
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
        for key, ids in (
            ("eos_token_id", self.eos_token_ids),
            ("bos_token_id", (self.bos_token_id or 0,)),
        ):
            for token in ids:
                check_at_most(key, token, self.vocab_size - 1, f"vocab_size is {self.vocab_size}")
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        check_positive(
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            moe_intermediate_size=self.moe_intermediate_size,
            decoder_sparse_step=self.decoder_sparse_step,
        )
        check_at_most(
            "num_experts_per_tok",
            self.num_experts_per_tok,
            self.num_experts,
            "more than num_experts",
        )
        for layer in self.mlp_only_layers:
            check_at_most(
                "mlp_only_layers",
                layer,
                self.num_layers - 1,
                f"the model has {self.num_layers} layers",
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether decoder layer `layer` is a mixture of experts (Hugging Face's `Qwen3MoeDecoderLayer` rule)."""
        return (
            self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )

    @classmethod
    def from_hf(cls, data: Mapping[str, object], source: str) -> ModelConfig:
        """Parse a `config.json` object.

        Args:
            data: the parsed JSON object.
            source: the file's name, for messages.

        Raises:
            ValueError: naming file, key and value, for anything missing, impossible or not supported.
        """
        fields = Fields(data, source)
        architecture = (*fields.strings("architectures"), "")[0]
        if architecture not in ARCHITECTURES:
            raise fields.error("architectures", f"supported are {', '.join(ARCHITECTURES)}")
        refuse_unsupported(fields, windowed_by_default=architecture == "MistralForCausalLM")
        qwen, sparse = (
            architecture.startswith("Qwen3"),
            architecture == "Qwen3MoeForCausalLM",
        )
        heads, hidden = (
            fields.integer("num_attention_heads"),
            fields.integer("hidden_size"),
        )
        # The defaults of an absent key are those of `transformers`' own configuration classes.
        positions = fields.integer("max_position_embeddings")
        default_head_dim = 128 if qwen and not sparse else hidden // max(heads, 1)
        with located(source):
            return cls(
                architecture=architecture,
                vocab_size=fields.integer("vocab_size"),
                hidden_size=hidden,
                intermediate_size=fields.integer("intermediate_size"),
                num_layers=fields.integer("num_hidden_layers"),
                num_heads=heads,
                num_kv_heads=fields.integer("num_key_value_heads", heads),
                head_dim=fields.integer("head_dim", default_head_dim),
                max_position_embeddings=positions,
                rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
                rope=RopeConfig.from_hf(fields, positions),
                qk_norm=qwen,
                attention_bias=fields.boolean("attention_bias", False),
                mlp_bias=fields.boolean("mlp_bias", False),
                tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
                num_experts=_num_experts(fields) if sparse else 0,
                num_experts_per_tok=fields.integer("num_experts_per_tok") if sparse else 0,
                moe_intermediate_size=fields.integer("moe_intermediate_size") if sparse else 0,
                norm_topk_prob=fields.boolean("norm_topk_prob", False) if sparse else False,
                decoder_sparse_step=fields.integer("decoder_sparse_step", 1) if sparse else 1,
                mlp_only_layers=fields.integers("mlp_only_layers", ()) if sparse else (),
                dtype=fields.string("dtype", fields.string("torch_dtype", "float32")),
                bos_token_id=fields.maybe_integer("bos_token_id"),
                eos_token_ids=fields.integers("eos_token_id", ()),
            )


def _num_experts(fields: Fields) -> int:
    """`num_experts`, or its newer spelling `num_local_experts`."""
    keys = [key for key in ("num_experts", "num_local_experts") if fields.has(key)]
    agreed({key: fields.integer(key) for key in keys}, fields.source)
    experts = fields.integer(keys[0] if keys else "num_experts")
    if experts < 1:
        raise fields.error(keys[0], "must be positive")
    return experts


def check_decoder(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_position_embeddings: int,
    rms_norm_eps: float,
) -> None:
    """Refuse shapes no decoder can have (target and head alike), naming the Hugging Face key."""
    check_positive(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
    )
    check_at_most(
        "max_position_embeddings",
        max_position_embeddings,
        MAX_POSITIONS,
        f"more than {MAX_POSITIONS}",
    )
    if num_heads % num_kv_heads:
        raise ValueError(f"num_key_value_heads = {num_kv_heads}: must divide num_attention_heads = {num_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim = {head_dim}: must be even for rotary embeddings")
    if not 0 < rms_norm_eps < 1:
        raise ValueError(f"rms_norm_eps = {rms_norm_eps}: must be between 0 and 1")


def refuse_unsupported(fields: Fields, windowed_by_default: bool) -> None:
    """Refuse by name the settings that would change the result and that the decoder does not have.

    `windowed_by_default`: whether `sliding_window` acts without `use_sliding_window` (Mistral) or is off (Qwen).
    """
    if fields.string("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "only silu is supported")
    if fields.has("quantization_config"):
        raise fields.error(
            "quantization_config",
            "quantised weights are not supported; use a bf16 or GGUF checkpoint",
        )
    kinds = fields.strings("layer_types", ())
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", "supported is full_attention")
    if not fields.has("sliding_window") or not fields.boolean("use_sliding_window", windowed_by_default):
        return
    full_layers = fields.integer("max_window_layers", 0)  # Qwen: the window starts above this layer
    if "sliding_attention" in kinds or (not kinds and full_layers < fields.integer("num_hidden_layers")):
        raise fields.error("sliding_window", "sliding-window attention is not supported")
