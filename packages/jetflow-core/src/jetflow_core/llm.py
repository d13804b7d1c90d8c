"""Offline use: load a target and its head, generate and stream in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jetflow_core.budget import Budget
from jetflow_core.config import ModelConfig
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.heads import Head, load_head
from jetflow_core.logprobs import TokenLogprobs
from jetflow_core.model import Decoder, build_model
from jetflow_core.request import Output, Usage
from jetflow_core.sampling import SamplingParams
from jetflow_core.tokenizer import Tokenizer
from jetflow_core.weights import open_checkpoint


@dataclass(frozen=True)
class Completion:
    """A finished generation. `error` is set, and the rest holds what came before, when the request failed.

    `logprobs` and `prompt_logprobs` as in `Output`, of all tokens.
    """

    token_ids: list[int]
    text: str
    finish_reason: str | None
    error: str | None
    usage: Usage
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def acceptance_length(self) -> float:
        """τ: mean tokens committed by a target pass that decided any."""
        return self.usage.completion_tokens / max(1, self.usage.target_steps)


class LLM:
    """A loaded engine with the calls a script wants.

    >>> llm = LLM.load("path/to/model", head="path/to/head")
    >>> llm.generate([llm.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])], SamplingParams(max_tokens=32))
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def load(
        cls,
        model: str | Path,
        head: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        exact: bool = False,
        config: EngineConfig | None = None,
    ) -> LLM:
        """Load `model` (folder, GGUF file or hub id) and optionally a draft `head` for it.

        `exact` makes speculation lossless to the bit in half precision too, at a price in speed.

        Raises ValueError (CheckpointError for files) naming what is wrong.
        """
        setups = [(head, config or EngineConfig())]
        return cls.load_each(model, setups, dtype=dtype, device=device, exact=exact)[0]

    @classmethod
    def load_each(
        cls,
        model: str | Path,
        setups: Sequence[tuple[str | Path | None, EngineConfig]],
        *,
        dtype: str = "auto",
        device: str = "auto",
        exact: bool = False,
    ) -> list[LLM]:
        """An engine for each of `setups`, a draft head and limits, with a cache of its own; all share one copy of `model`.

        A head that is named twice is loaded once. See `load` for the rest.
        """
        checkpoint = open_checkpoint(model)
        decoder = build_model(checkpoint, dtype, device)
        if exact:
            decoder.set_exact()
        heads: dict[str | Path, Head] = {}
        for source, _ in setups:
            if source is not None and source not in heads:
                heads[source] = _load_head(source, decoder)
        decoder.pack()  # not before: heads are built on the tables as they were read
        return [
            cls(Engine(decoder, checkpoint.tokenizer, None if source is None else heads[source], config))
            for source, config in setups
        ]

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer. Raises ValueError for a checkpoint that has none."""
        if self.engine.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer.json: work with token ids")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        budget: Budget | None = None,
    ) -> list[Completion]:
        """Run all `prompts` (token ids) in one batch; completions come in their order. `budget` as in `Engine.add`.

        When one prompt is refused (ValueError), or a step fails, none of them stays in the engine.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(each)} sampling parameters: give one for all or one each"
            )
        outputs: dict[str, list[Output]] = {}
        try:
            for prompt, own in zip(prompts, each, strict=True):
                outputs[self.engine.add(prompt, own, budget)] = []
            while self.engine.has_work:
                for output in self.engine.step():
                    if output.request_id in outputs:
                        outputs[output.request_id].append(output)
        finally:
            for request_id in outputs:  # what an exception has left behind
                self.engine.abort(request_id)
        return [_join(own) for own in outputs.values()]

    def stream(self, prompt: Sequence[int], params: SamplingParams, budget: Budget | None = None) -> Iterator[Output]:
        """Yield the outputs of one prompt as they come; stopping early frees the request."""
        request_id = self.engine.add(prompt, params, budget)
        try:
            while self.engine.has_work:
                for output in self.engine.step():
                    if output.request_id == request_id:
                        yield output
                        if output.finish_reason or output.error:
                            return
        finally:
            self.engine.abort(request_id)


def _load_head(source: str | Path, decoder: Decoder) -> Head:
    """The head in `source`, ready to draft for `decoder`."""
    assert decoder.lm_head.weight is not None
    head = load_head(source, decoder.embed, decoder.lm_head.weight)
    check_head(head, decoder.config, str(source))
    head.pack()
    return head


def check_head(head: Head, target: ModelConfig, source: str) -> None:
    """Raise ValueError when `head` was made for a target of another shape."""
    config = head.config
    if config.num_target_layers not in (None, target.num_layers):
        raise ValueError(
            f"draft head {source} belongs to a target with {config.num_target_layers} layers, this one has {target.num_layers}"
        )
    if max(config.target_layer_ids) >= target.num_layers:
        raise ValueError(
            f"draft head {source} taps layer {max(config.target_layer_ids)}, but the target has {target.num_layers} layers"
        )
    if config.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"draft head {source} expects a target of hidden size {config.target_hidden_size}, this one has {target.hidden_size}"
        )


def _join(outputs: Sequence[Output]) -> Completion:
    last = outputs[-1]
    scored = [output.logprobs for output in outputs if output.logprobs is not None]
    return Completion(
        [token for output in outputs for token in output.token_ids],
        "".join(output.text for output in outputs),
        last.finish_reason,
        last.error,
        last.usage,
        [entry for entries in scored for entry in entries] if scored else None,
        next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None),
    )
