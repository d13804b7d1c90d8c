"""`jetflow-train`: the whole recipe without a command, or one of its parts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from jetflow_train.config import EvaluateOptions, HeadOptions, RegenerateOptions, load_options, option_fields
from jetflow_train.evaluate import evaluate
from jetflow_train.recipe import run_recipe, train_head
from jetflow_train.regenerate import regenerate
from jetflow_train.report import measurement_table
from jetflow_train.terminal import Bars

COMMANDS = {"regenerate": RegenerateOptions, "head": HeadOptions, "evaluate": EvaluateOptions}
# The whole recipe at a size that two CPU cores finish within ten minutes.
DEMO: dict[str, dict[str, Any]] = {
    "regenerate": {"max_tokens": 128, "max_length": 512, "temperature": (0.0, 0.7)},
    "head": {
        "minutes": 4.0,
        "max_length": 512,
        "gamma": 4.0,
        "teacher_temperature": 0.7,
        "mask_token_id": 16,  # <empty_output>, which no answer contains
        "evaluate_minutes": 10.0,
        "checkpoint_minutes": 1.0,
    },
    "evaluate": {"budgets": (0, 8, 16), "limit": 6, "max_tokens": 64},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 for a user's mistake, 130 after an interrupt."""
    parsed = vars(_parser().parse_args(arguments))
    command, config = parsed.pop("command"), parsed.pop("config")
    try:
        _run(command, Path(config) if config else None, parsed)
    except ValueError as error:
        print(f"jetflow-train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _run(command: str | None, config: Path | None, flags: dict[str, Any]) -> None:
    with Bars() as bars:
        if command == "regenerate":
            made = regenerate(load_options(RegenerateOptions, config, flags), bars.rows)
            bars.say(f"{made} new rows")
        elif command == "head":
            path = train_head(load_options(HeadOptions, config, _with_length(flags, config)), bars.progress())
            bars.say(f"head: {path}")
        elif command == "evaluate":
            bars.say(measurement_table(evaluate(load_options(EvaluateOptions, config, flags), bars.decoding)))
        else:
            _whole_recipe(config, flags, bars)


def _whole_recipe(config: Path | None, flags: dict[str, Any], bars: Bars) -> None:
    output = flags.get("output", "jetflow-run")
    places: dict[str, dict[str, Any]] = {
        "regenerate": {"output": f"{output}/rows.jsonl"},
        "head": {"output": output, "data": (f"{output}/rows.jsonl",)},
        "evaluate": {"head": f"{output}/head"},
    }
    shared = {"target": flags["target"]} if "target" in flags else {}
    if shared:  # the demo's mask id is an ordinary token elsewhere
        places["head"]["mask_token_id"] = None
    length = {"minutes": flags["minutes"], "steps": None} if "minutes" in flags else {}
    regenerating = load_options(RegenerateOptions, config, places["regenerate"] | shared, DEMO["regenerate"])
    training = load_options(HeadOptions, config, places["head"] | shared | length, DEMO["head"])
    evaluating = load_options(EvaluateOptions, config, places["evaluate"] | shared, DEMO["evaluate"])
    before, after, head = run_recipe(regenerating, training, evaluating, bars.progress())
    bars.say(measurement_table(after, before))
    bars.say(f'head: {head}\ntry it: jetflow-serve generate --head {head} "What is the capital of France?"')


def _with_length(flags: dict[str, Any], config: Path | None) -> dict[str, Any]:
    """A length given on the command line replaces the other kind of length in the file."""
    other = {"minutes": "steps", "steps": "minutes"}
    given = [name for name in other if name in flags]
    return flags | {other[given[0]]: None} if config and len(given) == 1 else flags


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jetflow-train",
        description="Train a JetFlow draft head: regenerate data with the target, train, evaluate by real decoding. "
        "Without a command it does all three for the demo model.",
    )
    _config_flag(parser)
    parser.add_argument("--output", default=argparse.SUPPRESS, help="folder of the run (default: jetflow-run)")
    parser.add_argument("--target", default=argparse.SUPPRESS, help="target model (default: the demo model)")
    parser.add_argument("--minutes", type=float, default=argparse.SUPPRESS, help="length of the training (default: 4)")
    commands = parser.add_subparsers(dest="command", metavar="{" + ",".join(COMMANDS) + "}")
    for name, kind in COMMANDS.items():
        summary = (kind.__doc__ or "").split(":", 1)[1].strip()
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:])
        _config_flag(sub)
        _add_options(sub, kind)
    return parser


def _config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="TOML file with sections [regenerate], [head], [evaluate]; flags win")


def _add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    assert fields(kind)
    for name, annotation, default, text in option_fields(kind):
        flag = "--" + name.replace("_", "-")
        shown = "" if default is None or default == () else f" (default: {_shown(default)})"
        if annotation is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text + shown
            )
            continue
        many = get_origin(annotation) is tuple
        parser.add_argument(
            flag,
            type=_reader(get_args(annotation)[0] if many else annotation),
            action=_Tuple if many else "store",
            nargs="+" if many else None,
            default=argparse.SUPPRESS,
            help=(text + shown).replace("%", "%%"),
        )


class _Tuple(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _reader(annotation: Any) -> Any:
    """What turns a flag's text into its value; optional types read `none`."""
    if get_origin(annotation) is not UnionType:
        return annotation
    kind = next(arg for arg in get_args(annotation) if arg is not NoneType)

    def read(text: str) -> Any:
        return None if text == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse names it in its error message
    return read


def _shown(default: Any) -> str:
    return " ".join(str(item) for item in default) if isinstance(default, tuple) else str(default)


if __name__ == "__main__":
    sys.exit(main())
