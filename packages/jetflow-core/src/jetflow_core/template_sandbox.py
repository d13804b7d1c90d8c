"""A jinja environment in which a template from anywhere is safe to render: immutable, and with a budget of work.

It matches what chat templates are written for: `trim_blocks`, `lstrip_blocks`, loop controls, `{% generation %}`,
`raise_exception`, `strftime_now`, and a `tojson` that leaves text as it is. Jinja's own sandbox keeps templates from
Python's internals; here every loop step, call, sum and piece of text is also paid for, and what could make much out
of little (padding, formatting, large powers) is not there.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 18  # characters of a template
STEP = 32  # units a loop step, a call or a filter costs beside the text it makes
MEMBER = 32  # units for a member of a container
MACRO = 512  # units for the call of a macro, which sets up a scope of its own
UNITS = 16_000_000  # for one rendering: about a second's work

_STRING_METHODS = frozenset(
    {
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "rsplit",
        "splitlines",
        "startswith",
        "endswith",
        "lower",
        "upper",
        "title",
        "capitalize",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "isdigit",
        "isalpha",
        "isalnum",
        "isspace",
        "islower",
        "isupper",
        "removeprefix",
        "removesuffix",
        "partition",
        "rpartition",
        "join",
        "replace",
    }
)
_FILTERS = frozenset(
    {
        "abs",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "float",
        "int",
        "items",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "sort",
        "string",
        "title",
        "trim",
        "unique",
        "upper",
    }
)
_MAX_DEPTH = 64  # of nested lists and objects


class Budget:
    """Work left for one rendering."""

    def __init__(self, units: int) -> None:
        self._left = units

    def spend(self, units: int) -> None:
        """Pay for `units`; raises `ValueError` when they are used up."""
        self._left -= units
        if self._left < 0:
            raise ValueError("it does too much work")

    def spend_value(self, value: object, depth: int = 0) -> None:
        """Pay for a new value: the characters of a text, the members of a container and all they hold."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, int):
            self.spend(1 + value.bit_length() // 8)
        elif isinstance(value, Mapping | list | tuple):
            if depth > _MAX_DEPTH:
                raise ValueError("it nests values too deeply")
            if isinstance(value, Mapping):
                value = [item for pair in cast("Mapping[object, object]", value).items() for item in pair]
            members = cast("Sequence[object]", value)
            self.spend(MEMBER * (1 + len(members)))
            for member in members:
                self.spend_value(member, depth + 1)


_BUDGET: ContextVar[Budget] = ContextVar("work left for a chat template")


@contextmanager
def work_budget(units: int) -> Generator[Budget]:
    """Give the rendering inside `units` of work."""
    budget = Budget(units)
    token = _BUDGET.set(budget)
    try:
        yield budget
    finally:
        _BUDGET.reset(token)


class _Steps:
    """An iterable that pays for every step, as long as the iterable it wraps."""

    def __init__(self, iterable: Iterable[object], cost: int) -> None:
        self._iterable = iterable
        self._cost = cost

    def __iter__(self) -> Iterator[object]:
        budget = _BUDGET.get()
        for item in self._iterable:
            budget.spend(self._cost)
            yield item

    def __len__(self) -> int:
        return len(cast(Sized, self._iterable))


def _concat(values: Sequence[object]) -> str:
    """The `~` operator."""
    text = "".join(map(str, values))
    _BUDGET.get().spend(len(text))
    return text


def _sized(value: object) -> object:
    """A list or object that the template spells out."""
    _BUDGET.get().spend_value(value)
    return value


def _replace(text: object, old: str, new: str) -> str:
    text = str(text)
    _BUDGET.get().spend(len(text) + text.count(old) * len(new))
    return text.replace(old, new)


def _join(values: Iterable[object], separator: str = "") -> str:
    texts = [str(value) for value in values]
    _BUDGET.get().spend(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """JSON with text left as it is (jinja's own filter escapes it for HTML)."""
    if indent is not None and not 0 <= indent <= 16:
        raise ValueError(f"tojson: indent = {indent} must be in 0 … 16")
    _BUDGET.get().spend_value(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
    _BUDGET.get().spend(len(text))
    return text


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message)[:500])


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"%[^A-Za-z%]*\d", form):
        raise ValueError("strftime_now: no field widths, at most 100 characters")
    return datetime.datetime.now().strftime(form)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training masks; it renders as its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Filters only the rewriting below can name: no template can spell a space.
_PAID: dict[str, Callable[..., object]] = {"paid steps": _Steps, "paid text": _concat, "paid value": _sized}


class _Charge(NodeTransformer):
    """Makes loops, joined text and spelled-out containers pay."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Each step costs a fixed amount and the text its body holds."""
        if node.recursive:
            raise ValueError("recursive loops are not supported")
        fixed = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _paid(cast("nodes.Expr", node.iter), "paid steps", nodes.Const(STEP + fixed))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b`"""
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _paid(parts, "paid text")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """`[a, b]`"""
        self.generic_visit(node)
        return _paid(node, "paid value")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """`{a: b}`"""
        self.generic_visit(node)
        return _paid(node, "paid value")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """`(a, b)`, where it is a value and not a target"""
        self.generic_visit(node)
        return node if node.ctx != "load" else _paid(node, "paid value")


def _paid(node: nodes.Expr, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _paying(function: Callable[..., object]) -> Callable[..., object]:
    """`function` as a filter that costs a step and the text it makes."""

    @functools.wraps(function)  # also copies jinja's mark of what the filter wants passed
    def paying(*args: object, **kwargs: object) -> object:
        result = function(*args, **kwargs)
        _BUDGET.get().spend(STEP + (len(cast(Sized, result)) if isinstance(result, str | list) else 0))
        return result

    return paying


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates; see the module."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,  # folding constants would do work before there is a budget
        )
        own = {"replace": _replace, "join": _join, "tojson": _to_json, "safe": str}
        usual = {name: self.filters[name] for name in _FILTERS}
        self.filters = {name: _paying(function) for name, function in {**usual, **own}.items()} | _PAID
        names = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals = {**names, "raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def parse_charged(self, source: str) -> nodes.Template:
        """The template's tree with charges built in."""
        if len(source) > MAX_SOURCE:
            raise ValueError(f"it has {len(source)} characters, more than {MAX_SOURCE}")
        tree = self.parse(source)
        _Charge().visit(tree)
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of a text's methods only those that cannot make much out of little."""
        return super().is_safe_attribute(obj, attr, value) and (not isinstance(obj, str) or attr in _STRING_METHODS)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Fail at once; jinja would go on with an undefined value."""
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__} is not allowed")

    def wrap_str_format(self, value: Any) -> None:
        """No `str.format`: `is_safe_attribute` refuses it."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Pay for the result before it is made."""
        budget = _BUDGET.get()
        budget.spend(1)
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not supported")
        if operator == "**" and not (abs(left) < 1 << 64 and abs(right) <= 64):
            raise ValueError("a power is too large")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int):
                    budget.spend(max(one, 1) * len(cast(Sized, other)) if isinstance(other, str | list | tuple) else 0)
            if isinstance(left, int) and isinstance(right, int):
                budget.spend((left.bit_length() // 8 + 1) * (right.bit_length() // 8 + 1))
        result = super().call_binop(context, operator, left, right)
        budget.spend_value(result)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Pay for the call and for what it returns."""
        budget = _BUDGET.get()
        budget.spend(MACRO if isinstance(__obj, Macro) else STEP)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and not kwargs:
            budget.spend(owner.count(args[0]) * len(args[1]))
        elif isinstance(owner, str) and name == "join" and not kwargs:
            args = (list(args[0]),)
            budget.spend(len(owner) * len(args[0]))
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend_value(result)
        return result
