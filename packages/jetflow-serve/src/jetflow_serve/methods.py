"""The methods that `bench` compares: a name, a draft head and drafting options each, over one target."""

from __future__ import annotations

import difflib
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jetflow_core.engine import EngineConfig
from jetflow_core.llm import LLM
from jetflow_serve.choice import ModelChoice, engine_config

BASELINE = "AR"  # plain decoding on an engine without a head
LOOKUP = "lookup"  # the one name that says who drafts
SHARED = (  # what a comparison holds equal, or sets itself
    "budget",
    "page_size",
    "num_pages",
    "cache_gib",
    "max_batch_tokens",
    "max_running",
    "max_model_len",
    "prefix_cache",
)
FORM = re.compile(r"(?P<name>[^=:,|\s]+)(?:=(?P<head>[^=:]+))?(?::(?P<options>[^=:]+=.*))?")
HINT = "write NAME=HEAD, NAME=HEAD:option=value,… or, for the head of --head or the demo's, NAME alone"


@dataclass(frozen=True)
class Method:
    """A way to draft. `head` None: the one of the command line, where `options` (fields of `EngineConfig`) ask for any."""

    name: str
    head: str | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """What `--method NAME=HEAD:option=value,…` says, in order. Raises ValueError that names what is wrong."""
    methods = [parse_method(text) for text in texts]
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1 or name == BASELINE:
            taken = "is the baseline's" if name == BASELINE else "is given twice"
            raise ValueError(f"--method {name}: the name {taken}; choose another one")
    return methods


def parse_method(text: str) -> Method:
    """One method. Raises ValueError for a bad form, an option that does not exist or a value that it cannot have."""
    found = FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"--method {text}: {HINT}")
    name, head, given = found["name"], found["head"], found["options"]
    options = _parse_options(name, given) if given else {}
    if name == LOOKUP and head is None:
        options.setdefault("drafter", LOOKUP)
    try:
        EngineConfig(**options)
    except ValueError as error:
        raise ValueError(f"--method {name}: {error}") from error
    return Method(name, head, options)


def load_methods(choice: ModelChoice, options: Namespace, methods: Sequence[Method]) -> tuple[LLM, list[LLM]]:
    """The baseline's engine, without a head, and one for each of `methods`, all over one copy of the target.

    One request runs at a time, and every run reads its whole prompt, unless the command line says otherwise.
    Raises ValueError for what cannot be loaded, and for a method that needs a head where there is none.
    """
    common = engine_config(choice, options)
    if options.max_running is None:
        common = replace(common, max_running=1)
    if options.prefix_cache is None:
        common = replace(common, prefix_cache=False)
    setups: list[tuple[str | None, EngineConfig]] = [(None, replace(common, drafter="auto", budget=0))]
    if common.drafter == "auto":
        common = replace(common, drafter="head")  # a method is what it says: nothing joins its head unasked
    for method in methods:
        config = replace(common, **method.options)
        setups.append((_head(method, config, choice), config))
    baseline, *others = LLM.load_each(
        choice.model, setups, dtype=options.dtype, device=options.device, exact=options.exact
    )
    return baseline, others


def _head(method: Method, config: EngineConfig, choice: ModelChoice) -> str | None:
    """The head that drafts for a method, if any. Raises ValueError where there is one too many or too few."""
    if config.drafter == LOOKUP:
        if method.head is not None:
            raise ValueError(
                f"--method {method.name} names a draft head, which drafter=lookup does not use: leave it out"
            )
        return None
    head = method.head or choice.head
    if head is None:
        raise ValueError(f"--method {method.name} has no draft head: {HINT}")
    return head


def _parse_options(name: str, text: str) -> dict[str, Any]:
    hints = get_type_hints(EngineConfig)
    allowed = [each.name for each in fields(EngineConfig) if each.name not in SHARED]
    options: dict[str, Any] = {}
    for part in text.split(","):
        option, equals, value = part.partition("=")
        option = option.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"--method {name}: {part!r} is no option=value pair")
        if option not in allowed:
            near = difflib.get_close_matches(option, allowed, 1)
            nearest = f"the nearest is {near[0]}" if near else f"there are {', '.join(allowed)}"
            raise ValueError(f"--method {name}: there is no option {option!r}; {nearest}")
        if option in options:
            raise ValueError(f"--method {name}: {option} is given twice")
        options[option] = _value(f"--method {name}: {option}", hints[option], value.strip())
    return options


def _value(where: str, kind: Any, text: str) -> Any:
    """`text` as a value of the type `kind`: a number, a truth value, one of some texts, or None where that is allowed."""
    kinds = [part for part in get_args(kind) if part is not NoneType] if NoneType in get_args(kind) else [kind]
    if len(kinds) < len(get_args(kind)) and text == "none":
        return None
    (kind,) = kinds
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(f"{where} is {text!r}: use one of {', '.join(get_args(kind))}")
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{where} is {text!r}: use true or false")
        return text == "true"
    try:
        return kind(text)
    except ValueError as error:
        need = "a whole number" if kind is int else "a number"
        raise ValueError(f"{where} is {text!r}: use {need}") from error
