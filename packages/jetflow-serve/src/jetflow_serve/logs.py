"""What the server logs: one line a request, and whatever else happens, as text or as JSON. Prompts only where asked for."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jetflow_serve.service import Generation

LogFormat = Literal["text", "json"]
PLAIN = re.compile(r"[\w./:+-]+", re.ASCII)

requests_log = logging.getLogger("jetflow_serve.requests")


@dataclass
class RequestRecord:
    """An HTTP request while it runs. `status` 0: no answer has begun. `generation`: what it asked of the engine, if anything."""

    id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    generation: Generation | None = None

    def write(self, decode: Callable[[Sequence[int]], str] | None) -> None:
        """Log the request; with `decode` the texts of its prompts too."""
        fields: dict[str, Any] = {"id": self.id, "method": self.method, "path": self.path, "status": self.status}
        fields["seconds"] = round(time.perf_counter() - self.started, 4)
        if self.generation is not None:
            fields |= self.generation.summary()
            if decode is not None:
                fields["prompts"] = [
                    decode(ids) for ids in {tuple(job.prompt_ids): None for job in self.generation.jobs}
                ]
        requests_log.info("request", extra={"fields": fields})


current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)


class TextFormatter(logging.Formatter):
    """`2026-11-30T13:12:11.123Z info request id=… status=200 …`; values that are not plain words are JSON strings."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it where there is one."""
        pairs = "".join(f" {name}={_value(value)}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The object; a traceback is its field `traceback`."""
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **_fields(record)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(style: LogFormat) -> None:
    """Send our own lines, and warnings of everybody else, to stderr in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("jetflow_serve").setLevel(logging.INFO)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, separators=(",", ":"))
    return text if PLAIN.fullmatch(text) else json.dumps(text) if isinstance(value, str) else text
