"""Loading: several engines over one target."""

from __future__ import annotations

from pathlib import Path

from jetflow_core.engine import EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.model import load_model
from jetflow_core.sampling import SamplingParams
from tiny import tiny_head

TARGET = Path(__file__).parent / "golden" / "qwen3"


def test_engines_share_the_target_and_equal_heads_but_no_cache(tmp_path: Path) -> None:
    head = tiny_head(load_model(TARGET, "float32", "cpu"))
    head.save(tmp_path / "head")
    config = EngineConfig(num_pages=16)
    setups = [
        (None, config),
        (tmp_path / "head", config),
        (tmp_path / "head", EngineConfig(num_pages=16, candidates=1)),
    ]
    engines = [llm.engine for llm in LLM.load_each(TARGET, setups, dtype="float32")]
    assert len({id(engine.model) for engine in engines}) == 1
    assert len({id(engine.cache) for engine in engines}) == 3
    assert engines[0].head is engines[0].drafter is None
    assert engines[1].head is engines[2].head is not None
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    answers = [LLM(engine).generate([[5, 6, 7]], params, 6)[0].token_ids for engine in engines]
    assert answers[0] == answers[1] == answers[2]
