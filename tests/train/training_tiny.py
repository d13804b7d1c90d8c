"""A random target small enough for tests, and features for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from jetflow_core.config import ModelConfig, RopeConfig
from jetflow_core.heads import Head
from jetflow_core.model import Decoder
from jetflow_train.config import HeadOptions
from jetflow_train.data import Row, spread
from jetflow_train.features import RowFeatures, build_features, row_features
from jetflow_train.heads import head_config, new_head, target_tables, training_dtype
from jetflow_train.trainer import Trainer

CPU = torch.device("cpu")
VOCABULARY = 61
TAPS = (1, 3)  # what the rule gives for six layers and two taps


def tiny_model(seed: int = 0) -> Decoder:
    """A six-layer Llama-shaped decoder with random weights."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        qk_norm=False,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )
    torch.manual_seed(seed)
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3 if name == "embed" else 0.15)
    model.lm_head.weight = model.embed
    model.requires_grad_(False)
    model.set_max_positions(128)
    return model


def tiny_options(**changes: object) -> HeadOptions:
    """Options of a small head for `tiny_model`."""
    values: dict[str, object] = {
        "steps": 4,
        "block_size": 5,
        "layers": 2,
        "taps": 2,
        "pairwise_size": 8,
        "draft_vocab_size": 40,
        "teacher_top": 8,
        "anchors": 4,
        "blocks": 8,
        "held_out": 0.2,
        "dtype": "float32",
    }
    return HeadOptions(**(values | changes))  # pyright: ignore[reportArgumentType]


def tiny_rows(count: int, seed: int = 0, temperature: float = 0.0) -> list[Row]:
    """Rows of random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY - 1, (length,), generator=generator).tolist())

    return [Row(f"tiny/{i}", temperature, tokens(4 + i % 3), tokens(12 + i % 5)) for i in range(count)]


def tiny_head(model: Decoder, rows: list[Row], **changes: object) -> Head:
    """A head whose every parameter is random, so that nothing is hidden by a zero."""
    options = tiny_options(**changes)
    head = new_head(model, head_config(model, options), rows, seed=0)
    torch.manual_seed(1)
    for parameter in head.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    return head


def features_of(model: Decoder, row: Row, number: int = 0, top: int = 8) -> RowFeatures:
    """Features of one row without a store; taps stay float32."""
    taps, ids, logp = row_features(model, row, TAPS, top)
    return RowFeatures(number, len(row.prompt_ids), torch.tensor(row.tokens), taps, ids, logp)


MODEL = tiny_model()
ROWS = spread(tiny_rows(12))


def trainer(folder: Path, options: HeadOptions, rows: list[Row] = ROWS) -> Trainer:
    """A run for `MODEL` with a fresh head in `folder`, beside its features."""
    config = head_config(MODEL, options)
    store = build_features(folder / "features", MODEL, rows, config.target_layer_ids, options.teacher_top)
    dtype = training_dtype(options.dtype, MODEL.embed.device)
    head = new_head(MODEL, config, rows, options.seed, dtype)
    return Trainer(head, target_tables(MODEL, dtype), store, rows, replace(options, output=str(folder / "run")))


def weights(trained: Trainer) -> dict[str, torch.Tensor]:
    """Copies of the trained parameters."""
    return {name: p.detach().clone() for name, p in trained.head.named_parameters() if p.requires_grad}
