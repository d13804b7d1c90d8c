"""`jetflow-train`: the whole recipe without a command, or one of its parts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from io import TextIOWrapper
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import torch

from jetflow_train.ablation_report import write_ablation
from jetflow_train.ablations import ablate
from jetflow_train.config import (
    AblateOptions,
    EvaluateOptions,
    HeadOptions,
    RegenerateOptions,
    ThroughputOptions,
    load_options,
    option_fields,
    read_section,
    section_name,
)
from jetflow_train.distributed import launched
from jetflow_train.evaluate import evaluate
from jetflow_train.plots import NO_PLOT, can_plot, draw_training
from jetflow_train.recipe import run_recipe, train_head
from jetflow_train.regenerate import regenerate
from jetflow_train.report import evaluation_report
from jetflow_train.terminal import Bars
from jetflow_train.throughput import measure_throughput, speed_table

PARTS = {"regenerate": RegenerateOptions, "head": HeadOptions, "evaluate": EvaluateOptions}  # of the whole recipe
COMMANDS = PARTS | {"ablate": AblateOptions, "throughput": ThroughputOptions}
Compared = TypeVar("Compared", AblateOptions, ThroughputOptions)
RECIPE = "recipe_"  # prefix of the recipe's own options among the parsed ones; commands have some of the same names
# The whole recipe at a size that two CPU cores finish within ten minutes.
DEMO: dict[str, dict[str, Any]] = {
    "regenerate": {"max_tokens": 128, "max_length": 512, "batch_size": 32},
    "head": {
        "minutes": 5.0,
        "max_length": 512,
        "held_out": 0.05,
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
    _replace_unknown_characters()
    parsed = vars(_parser().parse_args(arguments))
    command, config = parsed.pop("command"), parsed.pop("config")
    try:
        _run(command, Path(config) if config else None, _flags(command, parsed))
    except (ValueError, OSError) as error:
        print(f"jetflow-train: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not _is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or "out of memory"
        print(f"jetflow-train: {reason}; use fewer blocks, a smaller batch size, or --device cpu", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _replace_unknown_characters() -> None:
    """A terminal that has no τ shows another character for it: no reason to end a run at its last line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether memory has run out; on a CPU torch says so with a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _flags(command: str | None, parsed: dict[str, Any]) -> dict[str, Any]:
    """The options given for `command`. Raises ValueError for one that stands before it, where the recipe's are."""
    recipe = {key.removeprefix(RECIPE): value for key, value in parsed.items() if key.startswith(RECIPE)}
    if command is None:
        return recipe
    if recipe:
        raise ValueError(
            f"--{min(recipe)} before {command} is an option of the whole recipe; "
            f"put the options of {command} after it (only --config may come first)"
        )
    return parsed


def _run(command: str | None, config: Path | None, flags: dict[str, Any]) -> None:
    if launched() and command != "head":
        raise ValueError(
            "torchrun starts many processes, and only `head` shares its work among them; run this one alone"
        )
    with Bars() as bars:
        if command == "regenerate":
            made = regenerate(load_options(RegenerateOptions, config, flags), bars.rows, bars.note)
            bars.say(f"{made} new rows")
        elif command == "head":
            path = train_head(load_options(HeadOptions, config, _with_length(flags, config)), bars.progress())
            if path is not None:
                bars.say(f"{plot_line(path.parent)}\nhead: {path}")
        elif command == "evaluate":
            bars.say(evaluation_report(evaluate(load_options(EvaluateOptions, config, flags), bars.decoding)))
        elif command == "ablate":
            options, base = with_head(AblateOptions, config, flags)
            bars.say("\n" + write_ablation(ablate(options, base, bars.progress()), Path(options.output)))
        elif command == "throughput":
            measured = measure_throughput(*with_head(ThroughputOptions, config, flags), bars.turns)
            bars.say(speed_table(*measured))
        else:
            _whole_recipe(config, flags, bars)


def with_head(kind: type[Compared], config: Path | None, flags: dict[str, Any]) -> tuple[Compared, HeadOptions]:
    """Options of a comparison, and of the head that it changes: [head] of the file, over the demo's settings.

    Raises ValueError when the two sections name different targets.
    """
    sections = {section_name(each): read_section(each, config) for each in (HeadOptions, kind)}
    target = flags["target"] if "target" in flags else _one_target(sections)
    options = load_options(kind, config, flags | {"target": target})
    return options, load_options(HeadOptions, config, {"steps": options.steps, "minutes": None}, _head_defaults(target))


def _head_defaults(target: str | None) -> dict[str, Any]:
    """The demo's settings of a head; its mask id is an ordinary token elsewhere."""
    return {key: value for key, value in DEMO["head"].items() if target is None or key != "mask_token_id"}


def _whole_recipe(config: Path | None, flags: dict[str, Any], bars: Bars) -> None:
    options = recipe_options(config, flags)
    before, after, head = run_recipe(*options, bars.progress())
    bars.say(f"\n{evaluation_report(after, before)}\n\n{plot_line(head.parent)}")
    bars.say(f'head: {head}\ntry it: jetflow-serve generate --head {head} "What is the capital of France?"')


def plot_line(folder: Path) -> str:
    """Draw the run in `folder` and say where, or why not: a head without its plot is still a head."""
    if not can_plot():
        return NO_PLOT
    try:
        return f"plot: {draw_training(folder)}"
    except ValueError as error:
        return f"no plot: {error}"


def recipe_options(
    config: Path | None, flags: dict[str, Any]
) -> tuple[RegenerateOptions, HeadOptions, EvaluateOptions]:
    """Options of the recipe's parts: one target for all, every part's input where the part before it writes.

    `flags` may hold output, target, device and minutes. They win over the file, the file over the demo's settings.
    Raises ValueError when sections of the file name different targets.
    """
    sections = {name: read_section(kind, config) for name, kind in PARTS.items()}
    target = flags["target"] if "target" in flags else _one_target(sections)
    shared = {"target": target} | {key: flags[key] for key in ("device",) if key in flags}
    output = flags.get("output", sections["head"].get("output", "jetflow-run"))
    rows = sections["regenerate"].get("output", f"{output}/rows.jsonl")
    head = _head_defaults(target) | {"output": output, "data": (rows,)}
    length = {"minutes": flags["minutes"], "steps": None} if "minutes" in flags else {}
    place = {"output": output} if "output" in flags else {}
    return (
        load_options(RegenerateOptions, config, shared, DEMO["regenerate"] | {"output": rows}),
        load_options(HeadOptions, config, shared | length | place, head),
        load_options(EvaluateOptions, config, shared, DEMO["evaluate"] | {"head": f"{output}/head"}),
    )


def _one_target(sections: dict[str, dict[str, Any]]) -> str | None:
    named = {name: section["target"] for name, section in sections.items() if "target" in section}
    if len(set(named.values())) > 1:
        listed = ", ".join(f"[{name}] {target or 'none'}" for name, target in named.items())
        raise ValueError(f"the recipe has one target, the file names several: {listed}; keep one or give --target")
    return next(iter(named.values()), None)


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
    _config_flag(parser, None)
    for name, kind, text in (
        ("output", str, "folder of the run (default: jetflow-run)"),
        ("target", str, "target model (default: the demo model)"),
        ("device", str, "auto, cpu or cuda (default: auto)"),
        ("minutes", float, "length of the training in minutes (default: 5)"),
    ):
        parser.add_argument(
            f"--{name}", metavar=name.upper(), dest=RECIPE + name, type=kind, default=argparse.SUPPRESS, help=text
        )
    commands = parser.add_subparsers(dest="command", metavar="{" + ",".join(COMMANDS) + "}")
    for name, kind in COMMANDS.items():
        summary = (kind.__doc__ or "").split(":", 1)[1].strip()
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:])
        _config_flag(sub, argparse.SUPPRESS)  # a default here would overwrite what came before the command
        _add_options(sub, kind)
    return parser


def _config_flag(parser: argparse.ArgumentParser, default: Any) -> None:
    text = "TOML file with sections [regenerate], [head], [evaluate], [ablate], [throughput]; flags win"
    parser.add_argument("--config", default=default, help=text)


def _add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    assert fields(kind)
    for name, annotation, default, text in option_fields(kind):
        flag = "--" + name.replace("_", "-")
        shown = "" if default is None or default == () else f" (default: {_shown(default)})"
        if annotation in (bool, bool | None):
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
