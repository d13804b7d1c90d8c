"""Configurations: every accepted spelling, every refusal by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetflow_core.config import HeadConfig, ModelConfig, RopeConfig, default_tap_layers
from jetflow_core.config_fields import read_json

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 12,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
MOE: dict[str, Any] = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}
DFLASH: dict[str, Any] = {
    **{key: QWEN[key] for key in QWEN if key not in ("architectures", "num_hidden_layers", "eos_token_id")},
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 3,
    "num_target_layers": 12,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 999, "target_layer_ids": [1, 5, 9]},
}


def model(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**QWEN, **changes}, "config.json")


def head(base: dict[str, Any] = DFLASH, /, dflash: dict[str, Any] | None = None, **changes: Any) -> HeadConfig:
    data = {**base, **changes}
    if dflash is not None:
        data["dflash_config"] = {**base["dflash_config"], **dflash}
    return HeadConfig.from_hf({key: value for key, value in data.items() if value != "drop"}, "config.json")


# -- models -----------------------------------------------------------------------------------------------------------


def test_qwen3() -> None:
    config = model()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (12, 8, 2, 16)
    assert config.qk_norm
    assert config.tie_word_embeddings
    assert config.rope == RopeConfig(theta=1e6)
    assert config.dtype == "bfloat16"
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_defaults_are_those_of_transformers() -> None:
    assert ModelConfig.from_hf({k: v for k, v in QWEN.items() if k != "head_dim"}, "c").head_dim == 128
    assert ModelConfig.from_hf({k: v for k, v in MOE.items() if k != "head_dim"}, "c").head_dim == 8
    llama = ModelConfig.from_hf(LLAMA, "c")
    assert (llama.head_dim, llama.num_kv_heads, llama.rope.theta) == (8, 8, 10000.0)
    assert not llama.qk_norm
    assert not llama.tie_word_embeddings
    assert llama.dtype == "float32"


def test_moe_sparse_layers() -> None:
    config = ModelConfig.from_hf(MOE, "c")
    assert [config.is_sparse(layer) for layer in range(6)] == [False, True, False, False, False, True]
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in MOE.items()}
    assert ModelConfig.from_hf(renamed, "c") == config
    assert not any(model().is_sparse(layer) for layer in range(12))


def test_several_end_tokens() -> None:
    assert model(eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert model(eos_token_id=None).eos_token_ids == ()


def test_mistral_is_llama_without_a_window() -> None:
    config = ModelConfig.from_hf({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}, "c")
    assert not config.qk_norm
    with pytest.raises(ValueError, match="sliding_window = 4096"):
        ModelConfig.from_hf({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "c")


def test_switched_off_windows_are_accepted() -> None:
    assert model(sliding_window=4096, use_sliding_window=False) == model()
    assert model(sliding_window=4096, use_sliding_window=True, max_window_layers=12) == model()
    assert model(layer_types=["full_attention"] * 12) == model()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"config\.json: architectures = \['GPT2LMHeadModel'\]: supported are"),
        ({"architectures": []}, r"architectures = \[\]"),
        ({"architectures": None}, "required key architectures is missing"),
        ({"architectures": "Qwen3ForCausalLM"}, "expected a list of strings"),
        ({"vocab_size": None}, r"config\.json: the required key vocab_size is missing"),
        ({"hidden_size": "64"}, r"config\.json: hidden_size = '64': expected an integer"),
        ({"hidden_size": True}, "hidden_size = True: expected an integer"),
        ({"hidden_size": -64}, r"config\.json: hidden_size = -64: must be positive"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be positive"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: must be positive"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide num_attention_heads = 8"),
        ({"head_dim": 15}, "head_dim = 15: must be even"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings = 1099511627776"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: expected a finite number"),
        ({"rope_theta": -1}, "rope_theta = -1"),
        ({"eos_token_id": 1000}, "eos_token_id = 1000: must be in 0 … 999; vocab_size is 1000"),
        ({"eos_token_id": [2, "x"]}, r"eos_token_id = \[2, 'x'\]: expected a list of integers"),
        ({"bos_token_id": -1}, "bos_token_id = -1"),
        ({"torch_dtype": "float8"}, "dtype = 'float8': supported are float32"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only silu"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes': expected true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* quantised weights are not supported"),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, "sliding_window = 128"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types .* supported is full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
)
def test_refused_models(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "required key num_experts is missing"),
        ({"num_experts": 0}, "num_experts = 0: must be positive"),
        ({"num_local_experts": 9}, "num_experts = 8 contradicts num_local_experts = 9"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be in 0 … 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0: must be positive"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"mlp_only_layers": [12]}, "mlp_only_layers = 12"),
        ({"moe_intermediate_size": None}, "required key moe_intermediate_size is missing"),
    ],
)
def test_refused_experts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**MOE, **changes}, "config.json")


# -- rope -------------------------------------------------------------------------------------------------------------


def test_rope_spellings_agree() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    expected = RopeConfig(theta=1e6, type="yarn", factor=4.0, original_max_position_embeddings=1024)
    assert model(rope_scaling=yarn).rope == expected
    assert model(rope_scaling={**yarn, "type": "yarn", "rope_type": None}).rope == expected
    assert model(rope_theta=None, rope_parameters={**yarn, "rope_theta": 1e6}).rope == expected
    assert model(rope_scaling=yarn, rope_parameters={**yarn, "rope_theta": 1e6}).rope == expected
    assert model(rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope == RopeConfig(5e5)


def test_rope_settings_are_kept() -> None:
    scaling = {"type": "yarn", "factor": 2, "beta_fast": 16, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}
    rope = model(rope_scaling=scaling).rope
    assert rope.original_max_position_embeddings == 4096, "transformers falls back to max_position_embeddings"
    assert (rope.beta_fast, rope.mscale, rope.mscale_all_dim, rope.truncate) == (16.0, 0.7, 0.9, False)
    assert model(rope_scaling={"type": "yarn", "factor": 2, "attention_factor": 1.25}).rope.attention_factor == 1.25
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = model(rope_scaling={**llama3, "original_max_position_embeddings": 512}).rope
    assert (rope.type, rope.low_freq_factor, rope.original_max_position_embeddings) == ("llama3", 1.0, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, r"rope_scaling\.type = 'dynamic': supported are default"),
        ({"rope_scaling": {"type": "linear"}}, r"required key rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "beta_fast = 3: not a setting"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 99}}, "beta_slow = 99"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings|freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor = '2': expected a finite number"),
        ({"rope_scaling": ["linear"]}, "rope_scaling = .* expected an object"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta = 1000000: contradicts rope_parameters"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 3}},
            "rope_parameters contradicts rope_scaling",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            r"rope_parameters\.full_attention = .* not a setting",
        ),
    ],
)
def test_refused_rope(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**changes)


# -- heads ------------------------------------------------------------------------------------------------------------


def test_dflash_head() -> None:
    config = head()
    assert not config.causal
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, 999, (1, 5, 9))
    assert (config.num_target_layers, config.target_hidden_size, config.branch_conditioning) == (12, 64, "none")


def test_every_family_says_causal_in_its_own_way() -> None:
    assert head(dflash={"causal_head": True}).causal
    assert head(dflash={"causal": True}).causal
    assert head(is_causal=True).causal
    edge = {**DFLASH, "dflash_config": "drop", "block_size": "drop", "jetspec_config": None}
    edge["jetspec_config"] = {"block_size": 8, "mask_token_id": 999, "causal_head": True, "target_layer_ids": [1, 5, 9]}
    assert head(edge) == head(dflash={"causal_head": True})


def test_block_size_in_either_place() -> None:
    assert head(block_size="drop", dflash={"block_size": 8}) == head()
    assert head(dflash={"block_size": 8}) == head()


def test_speculators_layout() -> None:
    decoder = {
        key: value for key, value in DFLASH.items() if key not in ("dflash_config", "block_size", "architectures")
    }
    data = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**decoder, "num_target_layers": None},
        "aux_hidden_state_layer_ids": [2, 6, 10],
        "mask_token_id": 999,
        "block_size": 8,
        "draft_vocab_size": 500,
    }
    config = HeadConfig.from_hf(data, "config.json")
    assert config == replace(head(), num_target_layers=None, draft_vocab_size=500)
    assert HeadConfig.from_hf({**data, "draft_vocab_size": 1000}, "c").draft_vocab_size is None
    with pytest.raises(ValueError, match="sample_from_anchor = True"):
        HeadConfig.from_hf({**data, "sample_from_anchor": True}, "c")


@pytest.mark.parametrize(
    ("dflash", "changes", "message"),
    [
        ({"causal": True}, {"is_causal": False}, r"dflash_config\.causal = True contradicts is_causal = False"),
        ({"block_size": 16}, {}, r"block_size = \(8,\) contradicts dflash_config\.block_size = \(16,\)"),
        ({"target_layer_ids": None}, {}, r"required key dflash_config\.target_layer_ids is missing"),
        ({"mask_token_id": None}, {}, r"required key dflash_config\.mask_token_id is missing"),
        ({"mask_token_id": 1000}, {}, "mask_token_id = 1000: must be in 0 … 999"),
        ({"target_layer_ids": [1, 12]}, {}, r"target_layer_ids = \[1, 12\]: 12 is outside the target's 12 layers"),
        ({"target_layer_ids": [-1, 3]}, {}, "-1 is outside"),
        ({"target_layer_ids": [5, 1]}, {}, "distinct layers in rising order"),
        ({"target_layer_ids": []}, {}, "at least one"),
        ({"mask_token_id": [1, 2]}, {}, "mask_token_id .* expected an integer"),
        ({"causal_head": 1}, {}, r"dflash_config\.causal_head = 1: expected true or false"),
        ({}, {"block_size": 1}, "block_size = 1: must be at least 2"),
        ({}, {"block_size": "drop"}, "block_size is missing"),
        ({}, {"dflash_config": "drop"}, "not a draft head"),
        ({}, {"attention_bias": True}, "attention_bias = True"),
        ({}, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window = 64"),
        ({}, {"jetflow_config": {"branch_conditioning": "tree"}}, "branch_conditioning = 'tree': supported are"),
        ({}, {"jetflow_config": {"branch_conditioning": "pairwise"}}, "pairwise_size = 0: must be positive"),
        ({}, {"jetflow_config": {"pairwise_size": 8}}, "pairwise_size = 8"),
        ({}, {"jetflow_config": {"pairwise_order": 2}}, "pairwise_order = 2: must be 1, or 2 with"),
        ({}, {"jetflow_config": {"pairwise_order": 3}}, "pairwise_order = 3"),
        ({}, {"jetflow_config": {"draft_vocab_size": 1001}}, "draft_vocab_size = 1001: must be in 1 … 1000"),
        ({}, {"jetflow_config": {"draft_temperature": 0}}, "draft_temperature = 0.0: must be a finite number above 0"),
        ({}, {"jetflow_config": {"draft_temperature": "hot"}}, "draft_temperature = 'hot': expected a finite number"),
        ({}, {"jetflow_config": {"gamma": 7}}, r"jetflow_config\.gamma = 7: unknown"),
        ({}, {"num_target_layers": 0}, "num_target_layers = 0: must be positive"),
    ],
)
def test_refused_heads(dflash: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head(dflash=None if "dflash_config" in changes else dflash, **changes)


ROPES = st.one_of(
    st.builds(RopeConfig, theta=st.sampled_from([1e4, 1e6])),
    st.builds(RopeConfig, theta=st.just(1e6), type=st.just("linear"), factor=st.sampled_from([2.0, 3.5])),
    st.builds(
        RopeConfig,
        type=st.just("yarn"),
        factor=st.sampled_from([2.0, 4.0]),
        original_max_position_embeddings=st.just(1024),
        attention_factor=st.sampled_from([None, 1.25]),
        mscale=st.sampled_from([None, 0.7]),
        truncate=st.booleans(),
    ),
)


@given(
    rope=ROPES,
    causal=st.booleans(),
    pairwise=st.integers(0, 64),
    order=st.sampled_from([1, 2]),
    draft_vocab_size=st.sampled_from([None, 1, 1000]),
    learned_mask=st.booleans(),
    draft_temperature=st.floats(0.1, 10),
)
def test_saved_heads_read_back_the_same(
    rope: RopeConfig,
    causal: bool,
    pairwise: int,
    order: int,
    draft_vocab_size: int | None,
    learned_mask: bool,
    draft_temperature: float,
) -> None:
    config = replace(
        head(),
        rope=rope,
        causal=causal,
        branch_conditioning="pairwise" if pairwise else "none",
        pairwise_size=pairwise,
        pairwise_order=order if pairwise else 1,
        draft_vocab_size=draft_vocab_size,
        learned_mask=learned_mask,
        draft_temperature=draft_temperature,
        target_hidden_size=48,
    )
    assert HeadConfig.from_hf(json.loads(json.dumps(config.to_hf())), "config.json") == config


def test_saved_heads_say_everything_every_reader_looks_for() -> None:
    data = replace(head(), causal=True).to_hf()
    dflash = data["dflash_config"]
    assert isinstance(dflash, dict)
    assert data["is_causal"] is dflash["causal"] is dflash["causal_head"] is True
    assert data["block_size"] == dflash["block_size"] == 8
    assert data["rope_theta"] == 1e6
    assert data["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert data["rope_scaling"] is None


def test_default_taps() -> None:
    assert default_tap_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_tap_layers(48, 5) == (1, 12, 23, 34, 45)
    assert default_tap_layers(40, 5) == (1, 10, 19, 28, 37)
    assert default_tap_layers(30, 1) == (15,)
    with pytest.raises(ValueError, match="5 taps need a target with at least 8 layers, this one has 4"):
        default_tap_layers(4, 5)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "cannot be read as JSON"),
    ],
)
def test_bad_json_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        read_json(path)


def test_missing_json_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_json(tmp_path / "config.json")
