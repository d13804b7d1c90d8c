"""Options of every command: one frozen dataclass a section of the TOML file, every field also a flag."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from jetflow_train.losses import LOSSES

Options = TypeVar(
    "Options", "RegenerateOptions", "HeadOptions", "EvaluateOptions", "AblateOptions", "ThroughputOptions"
)


MOST = 1e9  # for numbers without a natural limit: finite, and small enough to be multiplied
COLDEST, HOTTEST = 0.01, 100.0  # temperatures in a loss: beyond them lies one token alone, or noise
LONGEST_TIMEOUT = 1e6  # seconds; the system's own limit lies somewhere above


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class RegenerateOptions:
    """`jetflow-train regenerate`: let the target answer prompts."""

    target: str | None = _option(None, "target model: folder, GGUF file or hub id (default: the demo model)")
    device: str = _option("auto", "auto (CUDA where there is one), cpu or cuda")
    prompts: tuple[str, ...] = _option(
        (), "JSONL files of `turns`, `messages` or `prompt` (default: the packaged samples)"
    )
    output: str = _option("jetflow-run/rows.jsonl", "JSONL file of rows; rows that it already has are not made again")
    suffix: str = _option("", "text appended to every prompt of the files named in suffix_files")
    suffix_files: tuple[str, ...] = _option((), "prompt files (of `prompts`) that get the suffix")
    limit: int | None = _option(None, "at most this many prompts of each file")
    temperature: tuple[float, ...] = _option((0.0,), "temperatures; every prompt is answered at each")
    samples: int = _option(1, "answers to a prompt at each temperature above 0")
    top_p: float = _option(1.0, "sample from the likeliest tokens of this mass")
    top_k: int = _option(0, "sample from so many likeliest tokens; 0: from all")
    thinking: bool | None = _option(
        None, "the chat template's enable_thinking, recorded in the rows (default: its own way)"
    )
    max_tokens: int = _option(192, "longest answer, in tokens")
    max_length: int = _option(1024, "longest prompt and answer together, in tokens")
    batch_size: int = _option(8, "answers generated, or asked of the endpoint, at a time")
    seed: int = _option(0, "seed of sampled answers")
    head: str | None = _option(None, "draft head that speeds the answers up; it does not change them")
    budget: int = _option(8, "node budget with a head")
    endpoint: str | None = _option(
        None, "let an OpenAI-compatible endpoint answer that serves the target: http://host:port/v1"
    )
    endpoint_api: str = _option(
        "completions", "completions (token ids, exact) or chat (messages, where that is all it knows)"
    )
    endpoint_model: str | None = _option(None, "the target's name there (default: the first that it lists)")
    api_key_file: str | None = _option(None, "file with the endpoint's API key")
    retries: int = _option(6, "tries after a busy, broken or unreachable endpoint, with growing waits between them")
    timeout: float = _option(600.0, "seconds to wait for an answer of the endpoint")

    def __post_init__(self) -> None:
        _filled(self, "temperature")
        _within(self, 1, math.inf, "samples", "batch_size", "max_tokens", "limit")
        _within(self, 2, math.inf, "max_length")  # a token of the prompt and one of the answer
        _within(self, 0, math.inf, "retries", "budget")
        _positive(self, LONGEST_TIMEOUT, "timeout")
        if self.endpoint is None and (self.endpoint_model is not None or self.api_key_file is not None):
            raise ValueError("endpoint_model and api_key_file need an endpoint")
        if self.endpoint_api not in ("completions", "chat"):
            raise ValueError(f"endpoint_api {self.endpoint_api!r} is unknown: use completions or chat")
        if self.endpoint is not None and self.head is not None:
            raise ValueError("an endpoint drafts with its own head: leave out head, or endpoint")


@dataclass(frozen=True)
class HeadOptions:
    """`jetflow-train head`: train a draft head on regenerated rows."""

    target: str | None = _option(None, "target model: folder, GGUF file or hub id (default: the demo model)")
    device: str = _option("auto", "auto (CUDA where there is one), cpu or cuda")
    dtype: str = _option("auto", "the head's precision beside float32 master weights: auto, float32 or bfloat16")
    data: tuple[str, ...] = _option(
        ("jetflow-run/rows.jsonl",),
        "JSONL files of regenerated rows, or of a corpus: messages, prompt and response, text",
    )
    output: str = _option("jetflow-run", "folder of checkpoint, metrics and, in head/, the exported head")
    features: str | None = _option(None, "folder of cached target features (default: OUTPUT/features)")
    online: bool = _option(False, "compute target features at every visit of a row instead of caching them on disk")
    target_dtype: str = _option(
        "auto", "the target's precision: auto (its own where the hardware has it), float32 or bfloat16"
    )
    max_length: int = _option(1024, "rows are cut at this many tokens; a longer prompt is refused")
    held_out: float = _option(0.03, "share of prompts kept for evaluation, chosen by a hash of their content")
    # The head.
    kind: str = _option(
        "jetflow",
        "jetflow, or eagle: one autoregressive layer, for comparison; layers, attention, mask, conditioning, prefix do not apply",
    )
    block_size: int = _option(10, "slots of a block: the anchor and the drafted depths")
    layers: int = _option(3, "draft layers")
    intermediate_size: int | None = _option(None, "inner width of the draft MLP (default: the target's)")
    attention: str = _option("causal", "in-block attention: causal (JetFlow) or bidirectional (DFlash)")
    taps: int = _option(5, "tapped target layers, spread evenly")
    pairwise_size: int = _option(256, "inner width of the branch conditioning MLP; 0 trains without conditioning")
    pairwise_order: int = _option(1, "tokens back that branch conditioning sees: 1 or 2")
    draft_vocab_size: int | None = _option(8192, "score only the most frequent tokens; none scores all")
    mask_token_id: int | None = _option(None, "target id that marks mask slots (default: the table's last row)")
    init: str | None = _option(
        None,
        "folder or hub id of a head to start from, with its draft vocabulary: of the same shape, or with narrower conditioning",
    )
    learned_mask: bool = _option(True, "learn an embedding for mask slots instead of using the target's row")
    # The objective.
    loss: str = _option(
        "forward_kl",
        "what is minimised: forward_kl, reverse_kl, cross_entropy (of the target's argmax) or total_variation",
    )
    gamma: float | None = _option(6.0, "slot k counts exp(-(k-1)/gamma); none counts all slots alike")
    truncate: bool = _option(True, "realise the slot weights by cutting causal blocks at random, which is cheaper")
    d_pace: bool = _option(False, "slot k counts as drafts reach it, as measured so far; gamma is where that starts")
    prefix: float = _option(0.0, "chance that one more real token stands between a block's anchor and its masks")
    marginal_weight: float = _option(0.4, "weight of the unconditioned loss beside the conditioned one")
    teacher_top: int = _option(64, "teacher entries kept for each position")
    teacher_temperature: float = _option(1.0, "temperature of the teacher's distribution")
    draft_temperature: float = _option(1.0, "temperature of the head's distribution in the loss")
    # The optimisation.
    minutes: float | None = _option(None, "train for this long; drives the schedule by time")
    steps: int | None = _option(None, "train for this many steps; drives the schedule by steps")
    anchors: int = _option(32, "blocks drawn from a document at each visit")
    blocks: int = _option(96, "blocks of an optimiser step, over all ranks")
    accumulate: int = _option(1, "micro-batches that every rank computes its share of those blocks in")
    learning_rate: float = _option(1e-3, "peak learning rate of AdamW")
    warmup: float = _option(0.04, "share of the run with a rising learning rate")
    final_rate: float = _option(0.1, "share of the peak learning rate that the cosine ends at")
    weight_decay: float = _option(0.0, "decoupled weight decay")
    clip: float = _option(1.0, "largest gradient norm")
    seed: int = _option(0, "seed of initial weights, data order and anchors")
    checkpoint_minutes: float = _option(3.0, "time between checkpoints")
    keep: int = _option(2, "newest checkpoints to keep")
    evaluate_minutes: float = _option(10.0, "time between held-out evaluations")
    tensorboard: bool = _option(False, "write the metrics for TensorBoard too (needs its package)")

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give the length of the run as either minutes or steps")
        if self.kind not in ("jetflow", "eagle"):
            raise ValueError(f"kind {self.kind!r} is unknown: use jetflow or eagle")
        if self.kind == "eagle" and (self.attention != "causal" or self.prefix > 0):
            raise ValueError("an EAGLE head is causal and reads the row's own tokens: leave out attention and prefix")
        if self.attention not in ("causal", "bidirectional"):
            raise ValueError(f"attention {self.attention!r} is unknown: use causal or bidirectional")
        _filled(self, "data")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out {self.held_out} must be at least 0 and below 1")
        if self.loss not in LOSSES:
            raise ValueError(f"loss {self.loss!r} is unknown: use one of {', '.join(LOSSES)}")
        if not 0 <= self.prefix < 1:
            raise ValueError(f"prefix {self.prefix} must be at least 0 and below 1")
        _within(
            self, 1, math.inf, "layers", "intermediate_size", "taps", "anchors", "blocks", "teacher_top", "accumulate"
        )
        _within(self, 1, math.inf, "keep")
        if self.accumulate > self.blocks:
            raise ValueError(f"accumulate {self.accumulate} exceeds the {self.blocks} blocks of a step")
        _within(self, 2, math.inf, "max_length")
        _within(self, 0, 1, "warmup", "final_rate")
        _within(self, 0, MOST, "weight_decay", "marginal_weight")
        _within(self, 0, math.inf, "checkpoint_minutes", "evaluate_minutes")
        _within(self, COLDEST, HOTTEST, "teacher_temperature", "draft_temperature")
        _positive(self, MOST, "minutes", "steps")
        _positive(self, math.inf, "gamma", "clip")
        _positive(self, 1, "learning_rate")  # AdamW moves every weight by about so much a step
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} must lie between 0 and {2**63 - 1}")


@dataclass(frozen=True)
class EvaluateOptions:
    """`jetflow-train evaluate`: measure τ and tokens/s of real speculative decoding."""

    target: str | None = _option(None, "target model: folder, GGUF file or hub id (default: the demo model)")
    device: str = _option("auto", "auto (CUDA where there is one), cpu or cuda")
    head: str = _option("jetflow-run/head", "head folder or hub id")
    prompts: tuple[str, ...] = _option((), "JSONL workloads with `id` and `turns` (default: the packaged samples)")
    budgets: tuple[int, ...] = _option((0, 8, 16, 32), "node budgets; 0 is plain decoding, the base of the speed-up")
    limit: int = _option(8, "prompts of each workload")
    max_tokens: int = _option(96, "tokens generated for each prompt")
    output: str | None = _option(None, "JSON file for the results")

    def __post_init__(self) -> None:
        _filled(self, "budgets")
        for budget in self.budgets:
            if budget < 0:
                raise ValueError(f"budgets {list(self.budgets)}: each must be at least 0 nodes")
        _within(self, 1, math.inf, "limit", "max_tokens")


@dataclass(frozen=True)
class AblateOptions:
    """`jetflow-train ablate`: train heads that differ in one thing and compare their τ; [head] of the file is what they share."""

    target: str | None = _option(None, "target model: folder, GGUF file or hub id (default: the demo model)")
    device: str = _option("auto", "auto (CUDA where there is one), cpu or cuda")
    regenerated: tuple[str, ...] = _option(("jetflow-run/rows.jsonl",), "JSONL files of the target's own answers")
    corpus: tuple[str, ...] = _option(
        (), "JSONL files of other answers to the same prompts; without them data is not compared"
    )
    output: str = _option("jetflow-ablation", "folder of the heads, the table and the plot")
    only: tuple[str, ...] = _option((), "names of the variants to compare (default: all)")
    steps: int = _option(400, "train each for this many steps")
    minutes: float | None = _option(None, "train each for this long instead")
    budgets: tuple[int, ...] = _option((8, 32, 128), "node budgets")
    rows: int = _option(12, "held-out greedy rows of each data set that decoding is replayed on")
    row_tokens: int = _option(96, "tokens of each of them")
    decode: bool = _option(True, "decode workloads with every head too")
    prompts: tuple[str, ...] = _option((), "JSONL workloads with `id` and `turns` (default: the packaged samples)")
    limit: int = _option(6, "prompts of each workload")
    max_tokens: int = _option(64, "tokens generated for each prompt")

    def __post_init__(self) -> None:
        _filled(self, "regenerated")
        _within(self, 1, math.inf, "steps", "rows", "row_tokens", "limit")
        _within(self, 2, math.inf, "max_tokens")  # the first token comes out of the prefill and has no speed
        _positive(self, MOST, "minutes")
        if not self.budgets or min(self.budgets) < 1:
            raise ValueError(f"budgets {list(self.budgets)}: at least one, each of at least 1 node")


@dataclass(frozen=True)
class ThroughputOptions:
    """`jetflow-train throughput`: measure training speed against a plain loop; [head] of the file says what is trained."""

    target: str | None = _option(None, "target model: folder, GGUF file or hub id (default: the demo model)")
    device: str = _option("auto", "auto (CUDA where there is one), cpu or cuda")
    data: tuple[str, ...] = _option(("jetflow-run/rows.jsonl",), "JSONL files of rows")
    rows: int = _option(64, "rows to train on")
    output: str = _option("jetflow-throughput", "folder of their features")
    rounds: int = _option(5, "turns of every way to train")
    steps: int = _option(2, "optimiser steps of a turn")

    def __post_init__(self) -> None:
        _filled(self, "data")
        _within(self, 1, math.inf, "rows", "rounds", "steps")


def _within(options: Any, least: float, most: float, *names: str) -> None:
    """Raise ValueError for the first of the options `names` that is given and not between `least` and `most`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not least <= value <= most:  # a value that is no number lies nowhere
            limits = f"be at least {least}" if most == math.inf else f"lie between {least} and {most}"
            raise ValueError(f"{name} {value} must {limits}")


def _positive(options: Any, most: float, *names: str) -> None:
    """Raise ValueError for the first of the options `names` that is given and not above 0, or above `most`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value <= most:
            raise ValueError(
                f"{name} {value} must be positive" + ("" if most == math.inf else f" and at most {most:g}")
            )


def _filled(options: Any, name: str) -> None:
    """Raise ValueError when the list `name` is empty, as it can be in a file."""
    if not getattr(options, name):
        raise ValueError(f"{name} is an empty list; give at least one, or leave the option out")


def load_options(
    kind: type[Options], file: Path | None, flags: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Options:
    """Options from `defaults`, the section of `file` and the `flags` given; what comes later wins.

    Raises ValueError naming the file and the key for anything unknown or of the wrong type.
    """
    values = dict(defaults or {})
    section = read_section(kind, file)
    if "steps" in section:
        values.pop("minutes", None)
    return kind(**(values | section | dict(flags)))


def section_name(kind: type[Any]) -> str:
    """The TOML section of an options class: its name in lower case without `Options`."""
    return kind.__name__.removesuffix("Options").lower()


def read_section(kind: type[Any], file: Path | None) -> dict[str, Any]:
    """The options that `file` gives for `kind`; none without a file. Raises ValueError as `load_options` does."""
    if file is None:
        return {}
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot read this configuration ({error})") from error
    kinds = (RegenerateOptions, HeadOptions, EvaluateOptions, AblateOptions, ThroughputOptions)
    known_sections = {section_name(each) for each in kinds}
    if unknown := document.keys() - known_sections:
        raise ValueError(f"{file}: section [{min(unknown)}] is unknown; there are {', '.join(sorted(known_sections))}")
    section: Any = document.get(section_name(kind), {})
    if not isinstance(section, dict):
        raise ValueError(f"{file}: {section_name(kind)} must be a section: write [{section_name(kind)}] above its keys")
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", section).items():
        if key not in types:
            raise ValueError(
                f"{file}: [{section_name(kind)}] has an unknown key {key!r}; keys are the flags of "
                f"`jetflow-train {section_name(kind)} --help` with _ for -"
            )
        values[key] = _convert(value, types[key], f"{file}: [{section_name(kind)}] {key}")
    return values


def _convert(value: Any, kind: Any, where: str) -> Any:
    """A TOML value as the field's type: lists become tuples, integers may stand for floats, "none" for None."""
    if get_origin(kind) is UnionType:
        if value == "none":
            return None
        return _convert(value, next(arg for arg in get_args(kind) if arg is not NoneType), where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, found {value!r}")
        return tuple(_convert(item, get_args(kind)[0], where) for item in cast("list[Any]", value))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where}: expected {kind.__name__}, found {value!r}")
    return value


def option_fields(kind: type[Any]) -> list[tuple[str, Any, Any, str]]:
    """(name, type, default, help) of every option of a class."""
    types = get_type_hints(kind)
    return [(each.name, types[each.name], each.default, each.metadata["help"]) for each in fields(kind)]
