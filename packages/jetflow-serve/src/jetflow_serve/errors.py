"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, for every failure the server reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse


class ErrorDetail(BaseModel):
    """What went wrong. `param` names the request field at fault, `code` is a stable word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


class ApiError(HTTPException):
    """A failure with its HTTP status; raised anywhere in a request, rendered in one place."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers=dict(headers) if headers else None)
        detail = ErrorDetail(
            message=_printable(message),
            type=_type_of(status),
            param=None if param is None else _printable(param),
            code=code,
        )
        self.body = ErrorBody(error=detail)

    def response(self) -> JSONResponse:
        """This error as a JSON response."""
        return JSONResponse(self.body.model_dump(), self.status_code, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is at fault."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after_s: int = 1) -> ApiError:
    """A 429: the queue is full; the client may come back after `retry_after_s` seconds."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(retry_after_s)})


def unavailable(message: str, retry_after_s: int = 5) -> ApiError:
    """A 503: the server is stopping or its engine is gone."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(retry_after_s)})


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Pydantic's errors as one 400 that names one field at fault.

    A union of types yields an error a member: the member that got furthest speaks, those that got as far are joined.
    """
    related = [error for error in errors if _top(error["loc"]) == _top(errors[0]["loc"])]
    first = max(related, key=lambda error: len(error["loc"]))
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return bad_request(f"the body is not valid JSON: {reason}", code="invalid_json")
    param = _field([*first["loc"], *_named(first)])
    if param is None:
        text = f"the body must be a JSON object, sent as application/json: {first['msg']}"
        return bad_request(text, code="invalid_body")
    if first["type"] == "extra_forbidden":
        return bad_request(f"'{param}' is not a field this server supports", param, "unsupported_parameter")
    messages = dict.fromkeys(str(error["msg"]) for error in related if _field(error["loc"]) == _field(first["loc"]))
    text = "; or ".join(message.removeprefix("Value error, ") for message in messages)
    code = "unsupported_value" if first["type"] == "unsupported_value" else "invalid_value"
    return bad_request(f"'{param}': {text}", param, code)


def _named(error: Mapping[str, Any]) -> list[str]:
    """The field a rule between fields blames, when `error` comes from one."""
    blamed = error.get("ctx", {}).get("param")
    return [] if blamed is None else [blamed]


def _field(loc: Sequence[Any]) -> str | None:
    """The field's path as a client would write it, `messages.0.role`; union tags and the "body" root are left out."""
    names = [str(part) for part in loc if part != "body" and not _is_tag(part)]
    return ".".join(names) or None


def _is_tag(part: Any) -> bool:
    """Whether `part` of a pydantic location is the name of a union member (`str`, `list[int]`), not a field."""
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part or part[:1].isupper())


def _top(loc: Sequence[Any]) -> Any:
    return next((part for part in loc if part != "body" and not _is_tag(part)), None)


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _printable(text: str) -> str:
    """`text` without lone surrogates (JSON may carry them, UTF-8 cannot)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
