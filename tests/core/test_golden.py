"""The decoder equals `transformers` on tiny random checkpoints recorded by `golden/make_golden.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jetflow_core.config import RopeConfig
from jetflow_core.model import Decoder, load_model
from jetflow_core.rope import rope_table

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "config.json").is_file())
TOLERANCE = 1e-4


def hidden_states(model: Decoder, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and the stack [L + 1, T, C] in transformers' order: embedding, layers but the last, final norm."""
    layers = range(model.config.num_layers)
    with torch.no_grad():
        final, taps = model.forward_sequence(input_ids, tuple(layers))
        outputs = taps.view(len(input_ids), len(layers), -1).transpose(0, 1)
        return model.logits(final), torch.cat([model.embed[input_ids][None], outputs[:-1], final[None]])


def test_every_case_is_recorded() -> None:
    assert len(CASES) == 11


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers(case: str) -> None:
    model = load_model(GOLDEN / case, "float32", "cpu")
    expected = load_file(GOLDEN / case / "expected.safetensors")
    for index in (0, 1):
        logits, states = hidden_states(model, expected[f"input_ids.{index}"])
        torch.testing.assert_close(logits, expected[f"logits.{index}"], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(states, expected[f"hidden_states.{index}"], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("case", ["qwen3_yarn", "qwen3_yarn_mscale", "llama_linear", "llama_llama3"])
def test_scaling_changes_the_result(case: str) -> None:
    """The recorded sequences are long enough that ignoring the rope scaling would be noticed."""
    model = load_model(GOLDEN / case, "float32", "cpu")
    plain = load_model(GOLDEN / case, "float32", "cpu")
    config = model.config
    plain.cos_sin = rope_table(RopeConfig(config.rope.theta), config.head_dim, 64, 64)
    input_ids = load_file(GOLDEN / case / "expected.safetensors")["input_ids.1"]
    assert (hidden_states(model, input_ids)[0] - hidden_states(plain, input_ids)[0]).abs().max() > 0.01
