"""What the OpenAPI document says beyond the request and response schemas: failures, event streams, the API key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jetflow_serve.bodies import ChatCompletionChunk, TextCompletionChunk
from jetflow_serve.errors import ErrorBody

Responses = dict[int | str, dict[str, Any]]

REFERENCE = "#/components/schemas/{model}"
REASONS = {
    400: "The request is at fault; `param` names the field.",
    404: "There is no such model here.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` says when to come again.",
    500: "The server is at fault.",
    503: "The server is stopping, or its engine does not run.",
    504: "The request took longer than this server allows.",
}


def failures(*statuses: int) -> Responses:
    """The error responses of a route, all with an `ErrorBody`."""
    return {status: {"model": ErrorBody, "description": REASONS[status]} for status in (*statuses, 500)}


def events(chunk: type[BaseModel]) -> Responses:
    """A success that may also be a stream of server-sent events with `chunk` as their data.

    The schema is that of one event, as tools read OpenAPI 3.1 (3.2 calls it `itemSchema`).
    """
    bodies = [{"$ref": REFERENCE.format(model=name)} for name in (chunk.__name__, "ErrorBody")]
    data = {
        "anyOf": [
            {"const": "[DONE]"},
            {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": bodies}},
        ]
    }
    schema = {
        "type": "object",
        "description": f"One event: a {chunk.__name__}, `[DONE]` after the last one, or the ErrorBody that ends the stream.",
        "required": ["data"],
        "properties": {"data": data},
    }
    return {200: {"description": "The answer, or its events.", "content": {"text/event-stream": {"schema": schema}}}}


class DocumentedApp(FastAPI):
    """FastAPI with a document that has the schemas of events, the API key where one is needed, and no 422."""

    def __init__(self, *, needs_key: bool, open_paths: frozenset[str], **options: Any) -> None:
        super().__init__(**options)
        self._needs_key, self._open_paths = needs_key, open_paths

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            self._complete(super().openapi())
        assert self.openapi_schema is not None
        return self.openapi_schema

    def _complete(self, document: dict[str, Any]) -> None:
        schemas = document["components"]["schemas"]
        chunks = [(chunk, "serialization") for chunk in (ChatCompletionChunk, TextCompletionChunk)]
        schemas |= models_json_schema(chunks, ref_template=REFERENCE)[1]["$defs"]  # pyright: ignore[reportArgumentType]
        for name in ("HTTPValidationError", "ValidationError"):  # ours are 400s in OpenAI's shape
            schemas.pop(name, None)
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if self._needs_key and path not in self._open_paths:
                    operation["security"] = [{"key": []}]
                    operation["responses"]["401"] = {
                        "description": "The API key is wrong or missing.",
                        "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model="ErrorBody")}}},
                    }
        if self._needs_key:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
