"""Let the target answer prompts: the rows a head learns from.

Rows are appended as they finish and looked up by (id, temperature) at the next start, so an interrupted run goes on
where it stopped. A sampled row's seed depends on the option's seed and the row alone, so neither batch nor
interruption changes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from jetflow_core.engine import EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from jetflow_train.config import RegenerateOptions
from jetflow_train.data import Row, read_jsonl, row_key
from jetflow_train.prompts import SAMPLES, encode_prompts, read_prompts
from jetflow_train.targets import target_path


@dataclass
class _Pending:
    id: str
    temperature: float
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list[int])


def regenerate(
    options: RegenerateOptions, on_row: Callable[[int, int, int], object] = lambda done, total, tokens: None
) -> int:
    """Load the target and let it `answer`."""
    config = EngineConfig(
        budget=options.budget if options.head else 0,
        max_running=options.batch_size,
        max_model_len=options.max_length,
    )
    llm = LLM.load(target_path(options.target), options.head, device=options.device, config=config)
    return answer(llm, options, on_row)


def answer(
    llm: LLM,
    options: RegenerateOptions,
    on_row: Callable[[int, int, int], object] = lambda done, total, tokens: None,
) -> int:
    """Answer every prompt at every temperature into `options.output`; return how many rows were new.

    `on_row(done, total, tokens)` is told of each row, with its output length. Raises ValueError for prompts, target
    or output file that cannot be used.
    """
    output = Path(options.output)
    wanted = list(_wanted(llm, options))
    with _open_rows(output) as (stream, present):
        missing = [row for row in wanted if (row.id, row.temperature) not in present]
        done = len(wanted) - len(missing)
        on_row(done, len(wanted), 0)
        running: dict[str, _Pending] = {}
        for row in missing:
            params = SamplingParams(
                temperature=row.temperature,
                max_tokens=min(options.max_tokens, options.max_length - len(row.prompt_ids)),
                seed=row_seed(options.seed, row.id, row.temperature),
            )
            running[llm.engine.add(row.prompt_ids, params)] = row
        while llm.engine.has_work:
            for part in llm.engine.step():
                row = running[part.request_id]
                if part.error:
                    raise ValueError(f"prompt {row.id}: {part.error}")
                row.output_ids += part.token_ids
                if part.finish_reason:
                    _append(stream, output, Row(row.id, row.temperature, tuple(row.prompt_ids), tuple(row.output_ids)))
                    done += 1
                    on_row(done, len(wanted), len(row.output_ids))
    return len(missing)


def row_seed(seed: int, row_id: str, temperature: float) -> int:
    """The sampling seed of a row."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{row_id}/{temperature}".encode()).digest()[:7], "big")


def _wanted(llm: LLM, options: RegenerateOptions) -> Iterator[_Pending]:
    files = options.prompts or (str(SAMPLES),)
    if unknown := set(options.suffix_files) - set(files):
        raise ValueError(f"suffix_files names {min(unknown)}, which is not among prompts")
    seen: set[str] = set()
    for file in files:
        prompts = read_prompts(Path(file), options.suffix if file in options.suffix_files else "", options.limit)
        for prompt, ids in zip(prompts, encode_prompts(llm.tokenizer, prompts, options.max_length, file), strict=True):
            if prompt.id in seen:
                raise ValueError(f"{file}: prompt id {prompt.id} occurs twice; ids name rows, so they must differ")
            seen.add(prompt.id)
            for temperature in options.temperature:
                yield _Pending(prompt.id, temperature, ids)


@contextmanager
def _open_rows(path: Path) -> Generator[tuple[BinaryIO, set[tuple[str, float]]]]:
    """The output file open for appending, and which rows it has. Half a line left by a killed run is cut off."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            present = {row_key(row, f"{path}, line {number}") for number, row in read_jsonl(path, partial_end=True)}
            _cut_partial_line(path)
            yield stream, present
    except OSError as error:
        raise ValueError(f"{path}: cannot write rows ({error})") from error


def _cut_partial_line(path: Path) -> None:
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def _append(stream: BinaryIO, path: Path, row: Row) -> None:
    start = stream.tell()
    try:
        stream.write(json.dumps(asdict(row), separators=(",", ":")).encode() + b"\n")
        stream.flush()
    except OSError:
        os.truncate(path, start)
        raise
