"""Target features of every row: computed once and read back through memory maps, or computed at every visit.

Both ways give the same values, in the precision that is stored. A store is a folder of shards. Each shard holds consecutive
rows, end to end:

    shard-00000/index.json       row numbers, token counts, prompt lengths, ranges without loss
    shard-00000/tokens.npy       int32 [T]        prompt and output ids
    shard-00000/taps.npy         uint16 [T, K·C]  bfloat16 bits of the tapped layers' outputs
    shard-00000/teacher_ids.npy  int32 [O, M]     the target's M likeliest ids for every output token
    shard-00000/teacher_logp.npy float16 [O, M]   their log-probabilities over the whole vocabulary

`meta.json` carries a fingerprint of target, its precision, taps and rows (their tokens, so the chat template too, and their
loss masks); a store made for anything else is refused. A shard appears under its name only when complete, so an
interrupted build goes on where it stopped and a reader may follow a build.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from jetflow_core.layers import Attend
from jetflow_core.model import Decoder
from jetflow_train.chats import Span
from jetflow_train.data import Row, counted_spans, rows_fingerprint
from jetflow_train.distributed import ALONE, Ranks, SharedTarget
from jetflow_train.files import replace_file, sole_use

ROWS_PER_SHARD = 64
ANOTHER = "delete the folder or name another one"
HASHED = ("target", "rows")  # parts of a fingerprint whose values say nothing to a reader
# Rows are joined into one pass up to so many tokens, which fills a GPU. A CPU is busy with one row.
PASS_TOKENS = {"cuda": 16384}


@dataclass(frozen=True)
class RowFeatures:
    """Features of one row of T tokens, O of them output: views of the store, nothing is read until it is used."""

    row: int
    prompt_length: int
    tokens: Tensor  # int64 [T]
    taps: Tensor  # bfloat16 [T, K·C]
    teacher_ids: (
        Tensor  # int64 [O, M]; entry j belongs to output token j, the distribution at position prompt_length + j − 1
    )
    teacher_logp: Tensor  # float32 [O, M]
    ignored: tuple[Span, ...] = ()  # ranges of the output without a loss

    @property
    def spans(self) -> tuple[Span, ...]:
        """Half-open ranges of positions that carry the loss, ascending."""
        return counted_spans(self.prompt_length, len(self.tokens), self.ignored)

    def ends(self, positions: Tensor) -> Tensor:
        """Where the spans end that `positions` (any shape, each inside a span) lie in."""
        ends = torch.tensor([end for _, end in self.spans])
        return ends[torch.searchsorted(ends, positions, right=True)]


class Features(Protocol):
    """Features of numbered rows."""

    def __len__(self) -> int:
        """How many rows have features, the first ones."""
        ...

    def __getitem__(self, index: int) -> RowFeatures:
        """Features of a row, on the CPU."""
        ...

    def refresh(self) -> int:
        """Look for rows that have features since; return `len`."""
        ...

    def follow(self) -> None:
        """To be called by every rank when it needs no more features for now: see `SharedTarget.follow`."""
        ...


class OnlineFeatures:
    """Features computed by `model` whenever a row is visited; nothing is kept. `ranks` share the target's layers."""

    def __init__(
        self, model: Decoder, rows: Sequence[Row], tap_layers: Sequence[int], top: int, ranks: Ranks = ALONE
    ) -> None:
        _check_top(model, top)
        self._target = SharedTarget(model, ranks)
        self._model, self._rows, self._taps, self._top = model, rows, tuple(tap_layers), top

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> RowFeatures:
        row = self._rows[index]
        taps, ids, logp = row_features(self._model, row, self._taps, self._top)
        return RowFeatures(
            row=index,
            prompt_length=len(row.prompt_ids),
            tokens=torch.tensor(row.tokens),
            taps=taps.to(torch.bfloat16).cpu(),
            teacher_ids=ids.cpu(),
            teacher_logp=logp.to(torch.float16).float().cpu(),
            ignored=row.ignored,
        )

    def refresh(self) -> int:
        """All rows are there from the start."""
        return len(self)

    def follow(self) -> None:
        """Make the passes with the other ranks that they still need."""
        self._target.follow()


def target_fingerprint(model: Decoder) -> str:
    """A hash of the target's configuration and of samples of its weights."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, len(flat) // 997)].to(torch.float32).cpu().numpy()
        digest.update(name.encode() + sample.tobytes())
    return digest.hexdigest()


class FeatureStore:
    """Reads the shards of a folder in order; `refresh` picks up shards that a running build has finished since."""

    def __init__(self, path: Path, fingerprint: dict[str, Any], width: int, vocab_size: int) -> None:
        """`width` is that of the taps, K·C. `vocab_size` is the target's."""
        self.path = path
        self._check(fingerprint)
        self._widths, self._vocab_size = (width, fingerprint["top"]), vocab_size
        self._shards: list[_Shard] = []
        self._rows: list[tuple[int, int]] = []
        self.refresh()

    def _check(self, expected: dict[str, Any]) -> None:
        try:
            found = json.loads((self.path / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path}: not a feature store ({error}); {ANOTHER}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{self.path}: not a feature store (meta.json holds no object); {ANOTHER}")
        found = cast("dict[str, Any]", found)
        for key, value in expected.items():
            if found.get(key) != value:
                values = "" if key in HASHED else f" ({found.get(key)} instead of {value})"
                raise ValueError(f"{self.path}: features were made with another {key}{values}; {ANOTHER}")

    def refresh(self) -> int:
        """Open shards that have appeared; return the number of rows available."""
        while (self.path / f"shard-{len(self._shards):05d}").is_dir():
            shard = self._open(self.path / f"shard-{len(self._shards):05d}")
            self._rows += [(len(self._shards), index) for index in range(len(shard.lengths))]
            self._shards.append(shard)
        return len(self._rows)

    def _open(self, shard: Path) -> _Shard:
        try:
            return _Shard(shard, *self._widths)
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise self._damaged(shard, error) from error

    def _damaged(self, shard: Path, reason: object) -> ValueError:
        return ValueError(f"{shard}: damaged features ({reason}); delete {self.path} to make them again")

    def __len__(self) -> int:
        return len(self._rows)

    def follow(self) -> None:
        """Stored features need nobody."""

    def __getitem__(self, index: int) -> RowFeatures:
        number, position = self._rows[index]
        shard = self._shards[number]
        features = shard.row(position)
        for ids in (features.tokens, features.teacher_ids):
            if ids.min() < 0 or ids.max() >= self._vocab_size:
                raise self._damaged(shard.path, f"row {index} has ids outside the vocabulary")
        return features


class _Shard:
    def __init__(self, path: Path, width: int, top: int) -> None:
        self.path = path
        index = json.loads((path / "index.json").read_text(encoding="utf-8"))
        self.rows: list[int] = index["rows"]
        self.lengths: list[int] = index["lengths"]
        self.prompts: list[int] = index["prompts"]
        self.ignored = [tuple((start, end) for start, end in row) for row in index["ignored"]]
        self._tokens, self._taps, self._ids, self._logp = (
            np.load(path / f"{name}.npy", mmap_mode="r") for name in ("tokens", "taps", "teacher_ids", "teacher_logp")
        )
        self._start = np.concatenate([[0], np.cumsum(self.lengths)])
        outputs = [length - prompt for length, prompt in zip(self.lengths, self.prompts, strict=True)]
        self._output_start = np.concatenate([[0], np.cumsum(outputs)])
        tokens, outputs = int(self._start[-1]), int(self._output_start[-1])
        for name, array, dtype, shape in (
            ("tokens", self._tokens, np.int32, (tokens,)),
            ("taps", self._taps, np.uint16, (tokens, width)),
            ("teacher_ids", self._ids, np.int32, (outputs, top)),
            ("teacher_logp", self._logp, np.float16, (outputs, top)),
        ):
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(f"{name} is {array.dtype} {array.shape} instead of {np.dtype(dtype)} {shape}")

    def row(self, position: int) -> RowFeatures:
        tokens = slice(self._start[position], self._start[position + 1])
        outputs = slice(self._output_start[position], self._output_start[position + 1])
        return RowFeatures(
            row=self.rows[position],
            prompt_length=self.prompts[position],
            tokens=torch.from_numpy(self._tokens[tokens].astype(np.int64)),
            taps=torch.from_numpy(np.array(self._taps[tokens])).view(torch.bfloat16),
            teacher_ids=torch.from_numpy(self._ids[outputs].astype(np.int64)),
            teacher_logp=torch.from_numpy(self._logp[outputs].astype(np.float32)),
            ignored=self.ignored[position],
        )


def store_fingerprint(model: Decoder, rows: Sequence[Row], tap_layers: Sequence[int], top: int) -> dict[str, Any]:
    """What a store depends on, by name."""
    return {
        "target": target_fingerprint(model),
        "dtype": str(model.embed.dtype).removeprefix("torch."),
        "rows": rows_fingerprint(rows),
        "tap_layers": list(tap_layers),
        "top": top,
        "count": len(rows),
    }


def build_features(
    path: Path,
    model: Decoder,
    rows: Sequence[Row],
    tap_layers: Sequence[int],
    top: int,
    on_row: Callable[[], object] = lambda: None,
    ranks: Ranks = ALONE,
) -> FeatureStore:
    """Compute what is missing from the store at `path` and open it. `on_row` is called once per row, present or new.

    `ranks` share the shards that are missing, and from then on the target's layers (`SharedTarget`). They need one folder.

    Raises ValueError when the folder cannot be written, is damaged or belongs to another target or other rows, and for
    more teacher entries than the vocabulary has.
    """
    _check_top(model, top)
    fingerprint = store_fingerprint(model, rows, tap_layers, top)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if ranks.leads and not (path / "meta.json").exists():
            replace_file(path / "meta.json", json.dumps(fingerprint, indent=1).encode())
    except OSError as error:
        raise ValueError(f"{path}: cannot write features ({error})") from error
    ranks.wait()
    store = FeatureStore(path, fingerprint, len(tap_layers) * model.config.hidden_size, model.config.vocab_size)
    for _ in range(len(store)):
        on_row()
    missing = len(store) < len(rows)
    with sole_use(path) if missing and ranks.leads else nullcontext():
        _add_shards(store, model, rows, tap_layers, top, on_row, ranks)
    return store


def _add_shards(
    store: FeatureStore,
    model: Decoder,
    rows: Sequence[Row],
    tap_layers: Sequence[int],
    top: int,
    on_row: Callable[[], object],
    ranks: Ranks,
) -> None:
    """Compute the shards that `store` lacks of `rows`, this rank's share of them, and wait for the other ranks'."""
    path = store.path
    target = SharedTarget(model, ranks)
    for start in range(len(store), len(rows), ROWS_PER_SHARD)[ranks.rank :: ranks.world]:
        numbered = list(enumerate(rows))[start : start + ROWS_PER_SHARD]
        shard = path / f"shard-{start // ROWS_PER_SHARD:05d}"
        if shard.is_dir():  # another rank's, from before an interrupt
            continue
        try:
            _write_shard(shard, model, numbered, tap_layers, top, on_row)
        except OSError as error:
            shutil.rmtree(shard.with_name(shard.name + ".partial"), ignore_errors=True)  # room on a full disk
            raise ValueError(
                f"{shard}: cannot write features ({error}); what was made before is kept: make room, and the same command goes on"
            ) from error
    target.follow()
    store.refresh()


def _check_top(model: Decoder, top: int) -> None:
    if top > model.config.vocab_size:
        raise ValueError(f"teacher_top {top} exceeds the target's vocabulary of {model.config.vocab_size}")


def _write_shard(
    path: Path,
    model: Decoder,
    numbered: Sequence[tuple[int, Row]],
    tap_layers: Sequence[int],
    top: int,
    on_row: Callable[[], object],
) -> None:
    taps: list[NDArray[Any]] = []
    ids: list[NDArray[Any]] = []
    logp: list[NDArray[Any]] = []
    for part in _passes([row for _, row in numbered], PASS_TOKENS.get(model.embed.device.type, 0)):
        for row_taps, row_ids, row_logp in rows_features(model, part, tap_layers, top):
            taps.append(row_taps.to(torch.bfloat16).view(torch.uint16).cpu().numpy())
            ids.append(row_ids.to(torch.int32).cpu().numpy())
            logp.append(row_logp.to(torch.float16).cpu().numpy())
            on_row()
    index = {
        "rows": [number for number, _ in numbered],
        "lengths": [len(row.tokens) for _, row in numbered],
        "prompts": [len(row.prompt_ids) for _, row in numbered],
        "ignored": [row.ignored for _, row in numbered],
    }
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    np.save(partial / "tokens.npy", np.concatenate([np.array(row.tokens, np.int32) for _, row in numbered]))
    np.save(partial / "taps.npy", np.concatenate(taps))
    np.save(partial / "teacher_ids.npy", np.concatenate(ids))
    np.save(partial / "teacher_logp.npy", np.concatenate(logp))
    (partial / "index.json").write_text(json.dumps(index), encoding="utf-8")
    os.replace(partial, path)


def _passes(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    """`rows` in order, in groups of at most `tokens` tokens; a longer row is a group of its own."""
    groups: list[list[Row]] = []
    room = 0
    for row in rows:
        room -= len(row.tokens)
        if not groups or room < 0:
            groups.append([])
            room = tokens - len(row.tokens)
        groups[-1].append(row)
    return groups


def row_features(model: Decoder, row: Row, tap_layers: Sequence[int], top: int) -> tuple[Tensor, Tensor, Tensor]:
    """(taps [T, K·C], teacher ids [O, M], log-probabilities [O, M] float32 over the whole vocabulary) of one row."""
    return rows_features(model, [row], tap_layers, top)[0]


@torch.no_grad()
def rows_features(
    model: Decoder, rows: Sequence[Row], tap_layers: Sequence[int], top: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`row_features` of several rows from one pass of the target."""
    device = model.embed.device
    lengths = [len(row.tokens) for row in rows]
    ids = torch.tensor([token for row in rows for token in row.tokens], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    hidden, taps = model(ids, positions, _attend_rows(lengths), tuple(tap_layers))
    return [
        (row_taps, *_teacher(model, row_hidden[len(row.prompt_ids) - 1 : -1], top))
        for row, row_hidden, row_taps in zip(rows, hidden.split(lengths), taps.split(lengths), strict=True)
    ]


def _attend_rows(lengths: list[int]) -> Attend:
    """Causal attention within each of several sequences that lie end to end."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
        out = [functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return torch.cat(out, dim=2)[0].transpose(0, 1)

    return attend


def _teacher(model: Decoder, hidden: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The likeliest ids of each position and their log-probabilities."""
    ids: list[Tensor] = []
    logp: list[Tensor] = []
    # In slices: a whole row of float32 logits over a large vocabulary would not fit the cache, or the memory.
    for part in hidden.split(32):
        logits = model.logits(part).float()
        best = torch.topk(logits, top, dim=-1)
        ids.append(best.indices)
        logp.append(best.values - torch.logsumexp(logits, dim=-1, keepdim=True))
    return torch.cat(ids), torch.cat(logp)
