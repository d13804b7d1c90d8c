"""Record the golden files beside this script: tiny random checkpoints and what `transformers` computes from them.

Not part of the test run. The files in the repository were made with transformers 5.24.0 and torch 2.13.0 on a CPU:

    python -m venv scratch && scratch/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors
    scratch/bin/python tests/core/golden/make_golden.py

Each folder gets `config.json` and `model.safetensors` as `save_pretrained` writes them, and `expected.safetensors` with, for
sequence s, `input_ids.s` [T] int64, `logits.s` [T, V] and `hidden_states.s` [L + 1, T, C] float32. The last of the hidden
states is after the final norm; state i is the input of layer i, the output of layer i − 1.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name → (family, settings). Sequences of up to 64 tokens go far beyond the original lengths of the scaled ones.
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3_yarn": ("Qwen3", {"rope_parameters": YARN}),
    "qwen3_yarn_mscale": (
        "Qwen3",
        {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "qwen3_tied_bias": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False}),
    "qwen3_moe_norm": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}),
}


def build(family: str, settings: dict[str, object]) -> torch.nn.Module:
    """A random model whose every tensor matters: norms and biases away from one and zero, peaked attention and routing."""
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**{**COMMON, **copy.deepcopy(settings)})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    return model


def record(folder: Path, model: torch.nn.Module) -> None:
    """Write the checkpoint and the expected tensors into `folder`."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    expected: dict[str, torch.Tensor] = {}
    for index, length in enumerate((7, 64)):
        input_ids = torch.randint(VOCAB, (1, length))
        with torch.no_grad():
            output = model(input_ids, output_hidden_states=True, use_cache=False)
        expected[f"input_ids.{index}"] = input_ids[0].contiguous()
        expected[f"logits.{index}"] = output.logits[0].contiguous()
        expected[f"hidden_states.{index}"] = torch.stack(output.hidden_states)[:, 0].contiguous()
    save_file(expected, folder / "expected.safetensors")


def main() -> None:
    """Record every case."""
    for seed, (name, (family, settings)) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        record(Path(__file__).parent / name, build(family, settings))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")  # noqa: T201


if __name__ == "__main__":
    main()
