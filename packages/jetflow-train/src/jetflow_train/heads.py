"""A new head for a target: its configuration from the options, its draft vocabulary and initial weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from jetflow_core.config import HeadConfig, ModelConfig, default_tap_layers
from jetflow_core.eagle import EagleHead
from jetflow_core.eagle_config import EagleConfig
from jetflow_core.head import DraftHead, PairwiseMLP
from jetflow_core.heads import Head, load_head
from jetflow_core.layers import has_native_bfloat16
from jetflow_core.model import Decoder
from jetflow_train.config import HeadOptions
from jetflow_train.data import Row, frequent_tokens

GROWING = ("pairwise_order", "pairwise_size")  # what may be more than in the head that a training starts from
EXPANDED = 8  # nodes of a level that an EAGLE head's tree goes on from


def head_config(model: Decoder, options: HeadOptions) -> HeadConfig | EagleConfig:
    """The head's configuration: the target's shape with the options' changes. Raises ValueError for what cannot be."""
    return head_shape(model.config, options)


def head_shape(target: ModelConfig, options: HeadOptions) -> HeadConfig | EagleConfig:
    """`head_config` for a target whose weights are not loaded."""
    if options.block_size > target.max_position_embeddings:
        raise ValueError(
            f"block_size {options.block_size} exceeds the target's {target.max_position_embeddings} positions"
        )
    shared: dict[str, Any] = {
        "target_layer_ids": default_tap_layers(target.num_layers, options.taps),
        "num_target_layers": target.num_layers,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": options.intermediate_size or target.intermediate_size,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope": target.rope,
        "draft_vocab_size": options.draft_vocab_size,
    }
    if options.kind == "eagle":
        return EagleConfig(**shared, depth=options.block_size - 1, expanded=EXPANDED)
    return HeadConfig(
        **shared,
        block_size=options.block_size,
        mask_token_id=target.vocab_size - 1 if options.mask_token_id is None else options.mask_token_id,
        num_layers=options.layers,
        causal=options.attention == "causal",
        branch_conditioning="pairwise" if options.pairwise_size else "none",
        pairwise_size=options.pairwise_size,
        pairwise_order=options.pairwise_order,
        learned_mask=options.learned_mask,
    )


def new_head(
    model: Decoder,
    config: HeadConfig | EagleConfig,
    rows: Sequence[Row],
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Head:
    """A freshly initialised head in `dtype` whose draft vocabulary is the most frequent output tokens of `rows`."""
    vocabulary = None
    if config.draft_vocab_size is not None:
        always = [token for token in model.config.eos_token_ids if token < config.vocab_size]
        ids = frequent_tokens(rows, config.draft_vocab_size, config.vocab_size, always)
        vocabulary = torch.tensor(ids, device=model.embed.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = _empty_head(model, config, vocabulary, dtype)
        head.reset_parameters()
    return head.to(model.embed.device, dtype).float_tables()


def _empty_head(
    model: Decoder, config: HeadConfig | EagleConfig, vocabulary: torch.Tensor | None, dtype: torch.dtype
) -> Head:
    """A head of the kind that `config` describes, its weights still to be set."""
    tables = target_tables(model, dtype)
    if isinstance(config, EagleConfig):
        return EagleHead(config, *tables, vocabulary)
    return DraftHead(config, *tables, vocabulary)


def continued_head(
    path: str, model: Decoder, config: HeadConfig | EagleConfig, dtype: torch.dtype = torch.float32
) -> Head:
    """The head of folder or hub id `path`, with its own draft vocabulary, to be trained on.

    Conditioning may be of a higher order or wider than that head's: what it adds starts at zero, so the head first drafts as
    that one.

    Raises ValueError naming what differs when it is not of the shape `config`.
    """
    stored = load_head(path, *target_tables(model, dtype))
    if type(stored.config) is not type(config):
        raise ValueError(f"init {path}: that head is of another kind; change the option kind or the head")
    differing: list[str] = []
    for each in fields(config):
        had, wanted = getattr(stored.config, each.name), getattr(config, each.name)
        if each.name in GROWING and had < wanted and isinstance(stored, DraftHead) and stored.pairwise:
            continue
        if had != wanted and each.name not in (
            "rope",
            "max_position_embeddings",
            "draft_temperature",
        ):  # the target's, however spelled there, and what is fitted anew
            differing.append(f"{each.name} = {had!r}, this run makes {wanted!r}")
    if differing:
        raise ValueError(f"init {path}: that head has {'; '.join(differing)}; change the options or the head")
    head = _empty_head(model, config, stored.draft_vocab, dtype)
    weights = stored.state_dict()
    if isinstance(head, DraftHead) and head.pairwise is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head.reset_parameters()
        weights |= _grown(head.pairwise, weights)
    head.load_state_dict(weights)
    return head.to(model.embed.device, dtype).float_tables()


def _grown(pairwise: PairwiseMLP, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` of a conditioning MLP that may have fewer inner units and no `before`, in the shapes of `pairwise`.

    New inner units have the initial weights of `pairwise`, which do not reach its output yet; a new `before` is zero.
    """
    grown: dict[str, Tensor] = {}
    for name, initial in pairwise.state_dict().items():
        had, value = weights.get(f"pairwise.{name}"), initial.clone()
        if had is None:
            value.zero_()
        elif name == "down.weight":
            value[:, : had.shape[1]] = had
        else:  # rows of a gate and rows of what it gates; or a norm, which does not grow
            gates = 2 if value.dim() == 2 else 1
            value.unflatten(0, (gates, -1))[:, : len(had) // gates] = had.unflatten(0, (gates, -1))
        grown[f"pairwise.{name}"] = value
    return grown


def set_draft_temperature(head: Head, temperature: float) -> None:
    """Let what is exported of `head` from now on say that its draft log-probabilities are to be divided by `temperature`."""
    if isinstance(head, EagleHead):
        head.config = replace(head.config, draft_temperature=temperature)
    else:
        head.config = replace(head.config, draft_temperature=temperature)


def target_tables(model: Decoder, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's input table and LM head [V, C] in `dtype`, which a head shares."""
    assert model.lm_head.weight is not None, "a packed target has no LM-head rows to share"
    return model.embed.detach().to(dtype), model.lm_head.weight.detach().to(dtype)


def target_mark(embed: Tensor) -> str:
    """A hash of samples of the target's input table [V, C], which tells targets apart wherever they lie.

    It does not depend on whether the table was loaded in bfloat16 or float32.
    """
    flat = embed.detach().flatten()
    sample = flat[:: max(1, len(flat) // 997)].to(torch.bfloat16).float()
    return hashlib.sha256(sample.cpu().numpy().tobytes()).hexdigest()[:16]


def training_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The precision a head is trained in. "auto" is bfloat16 where the hardware multiplies it, else float32."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type != "cpu" or has_native_bfloat16() else "float32"
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise ValueError(f"dtype {dtype!r} is unknown for training: use auto, {', '.join(known)}")
    return known[dtype]
