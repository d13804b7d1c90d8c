"""The `jetflow-serve` command: `serve` (the default), `generate`, `bench`, `bench-serve` and `verify`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from jetflow_serve.config_file import read_config

DESCRIPTION = """\
Serve, try and measure a language model with lossless tree speculative decoding.

Without a command it serves: `jetflow-serve` alone starts the demo model on http://127.0.0.1:8000, and
`jetflow-serve --port 9000` is `jetflow-serve serve --port 9000`."""

DEFAULT_BUDGETS = "8,16,32"  # of bench
# Options that only some kinds of `bench` read: measurements, predictions, and both predictions and their validation.
MEASURED = ("repeats", "tau_only", "trace", "temperature", "seed")
PREDICTED = ("shape", "batch", "context", "plot")
SIMULATED = ("shape", "batch", "context", "device_profile", "kernels", "host_ms", "save_profile", "validate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status. Users' mistakes are one line on stderr and status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        arguments.insert(0, "serve")
    options = build_parser().parse_args(arguments)
    try:
        if getattr(options, "config", None) is not None:  # the flags are read again, over what the file says
            options = build_parser(Path(options.config)).parse_args(arguments)
        return _run(options)
    except (ValueError, OSError) as error:
        print(f"jetflow-serve: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    """Start a command. Imports wait until here, so that --help and usage errors need no torch."""
    if options.command == "generate":
        from jetflow_serve.generate import generate  # noqa: PLC0415

        return generate(options, _write)
    if options.command == "bench":
        return _run_bench(options)
    if options.command == "bench-serve":
        from jetflow_serve.bench_serve import bench_serve  # noqa: PLC0415

        return bench_serve(options, _write, _write_progress)
    if options.command == "verify":
        from jetflow_serve.verify import verify  # noqa: PLC0415

        return verify(options, _write, _write_progress)
    from jetflow_serve.server import serve  # noqa: PLC0415

    return serve(options, _write)


def _run_bench(options: argparse.Namespace) -> int:
    """Measure, or with `--simulate` predict."""
    _refuse_unread(options)
    if options.simulate is not None:
        from jetflow_serve.simulate import simulate  # noqa: PLC0415

        return simulate(options, _write, _write_progress)
    if not options.data:
        raise ValueError("bench measures prompts: name their files with --data (only --simulate does without)")
    from jetflow_serve.bench import bench  # noqa: PLC0415

    options.budgets = DEFAULT_BUDGETS if options.budgets is None else options.budgets
    return bench(options, _write, _write_progress)


def _refuse_unread(options: argparse.Namespace) -> None:
    """Raise ValueError for an option of `bench` that has been given and that what is asked for does not read."""
    if options.simulate is None:
        reason, unread = "belongs to --simulate TRACE.jsonl: name a trace, or leave it out", SIMULATED
    elif options.validate:
        reason, unread = "does nothing with --validate: leave it out", (*MEASURED, *PREDICTED)
    else:
        reason, unread = "does nothing with --simulate: leave it out", (*MEASURED, "data")
    defaults = build_parser().parse_args(["bench"])
    for name in unread:
        if getattr(options, name) != getattr(defaults, name):
            raise ValueError(f"--{name.replace('_', '-')} {reason}")


def _write(text: str) -> None:
    """Show `text` at once."""
    print(text, end="", flush=True)


def _write_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_parser(config: Path | None = None) -> argparse.ArgumentParser:
    """The whole command line; `config` is a file with defaults for `serve`. Raises ValueError for what is wrong in it."""
    parser = argparse.ArgumentParser(
        prog="jetflow-serve", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"jetflow-serve {version('jetflow-serve')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="an OpenAI-compatible HTTP server (the default)")
    _add_serve(serve)
    if config is not None:
        serve.set_defaults(**read_config(config, serve))
    _add_generate(commands.add_parser("generate", help="answer one prompt and print the speed-up"))
    _add_bench(commands.add_parser("bench", help="measure budgets over prompts from files"))
    _add_bench_serve(commands.add_parser("bench-serve", help="measure a server under load, budget against budget"))
    _add_verify(commands.add_parser("verify", help="hold every speculative answer to the one of budget 0"))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve /v1/chat/completions and /v1/completions; /health, /ready and /metrics for whoever runs it; documented at /docs. "
        "SIGTERM or Ctrl-C lets running requests finish, a second one cuts them."
    )
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        help="options from a file, named as the flags are (port = 9000); flags override it",
    )
    _add_model_options(parser)
    _add_budget(parser)
    _add_http(parser)
    _add_load(parser)
    logs = parser.add_argument_group("logs (on stderr, a line a request)")
    logs.add_argument("--log-format", choices=["text", "json"], default="text", help="(%(default)s)")
    logs.add_argument(
        "--log-prompts", action="store_true", help="the prompts too; without this no line holds any of their text"
    )


def _add_http(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one (%(default)s)")
    http.add_argument("--port", type=_at_least(0), default=8000, help="0 picks a free one (%(default)s)")
    http.add_argument("--served-model-name", metavar="NAME", help="the name clients use (the model's own)")
    http.add_argument(
        "--max-body-mib", type=_positive, default=4.0, metavar="MIB", help="larger bodies get 413 (%(default)s)"
    )
    access = parser.add_argument_group("access (without a key everyone who can connect may use the server)")
    access.add_argument(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help="require `Authorization: Bearer KEY` everywhere but at /health and /ready; other users of the machine can see a "
        "command line, so rather use:",
    )
    access.add_argument("--api-key-file", metavar="FILE", help="keys from a file, one a line")
    access.add_argument(
        "--cors-origin",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages whose scripts may call, such as https://example.org; '*': all (none)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--max-queue",
        type=_at_least(1),
        metavar="N",
        help="sequences taken, running and waiting; more get 429 (8 times --max-running)",
    )
    load.add_argument(
        "--request-timeout",
        type=_not_negative,
        default=600.0,
        metavar="S",
        help="seconds a request may take, waiting included; 0: no limit (%(default)s)",
    )
    load.add_argument(
        "--shutdown-timeout",
        type=_not_negative,
        default=30.0,
        metavar="S",
        help="seconds running requests may go on once the server is told to stop (%(default)s)",
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the answer as it comes, then tokens/s, τ (tokens a target pass) and the speed-up against the same "
        "request at budget 0, which is run again for it."
    )
    parser.add_argument("prompt", help="what to say to the model")
    _add_model_options(parser)
    _add_budget(parser)
    _add_sampling(parser, max_tokens=256)
    parser.add_argument("--no-chat", action="store_true", help="continue the text as it is, without the chat template")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare ways to draft: run every prompt by plain decoding (AR) and by each method at each budget in turn, one request "
        'at a time, all on one copy of the target. Rows are {"id": ..., "turns": [text, ...]}; the first turn is asked through '
        "the chat template. Prints speed, acceptance and the phases of a step with hardware and dtype. Answers are held to AR's: "
        "in float32 and with --exact any difference is status 1, in half precision a greedy one that was no near-tie."
    )
    _add_data(parser, required=False)
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--method",
        action="append",
        default=[],
        metavar="NAME[=HEAD][:option=value,...]",
        help="a draft head (folder or hub id; without one that of --head or the demo's) and how it drafts: drafter=head, lookup "
        "or head+lookup, candidates (1: a chain of argmaxes), draft_passes, draft_width (nodes that a level of EAGLE's tree "
        "expands), draft_depth, draft_cutoff, draft_temperature. "
        "The name `lookup` alone is the drafter without a head. Repeat it for more methods (without any: the head of --head or "
        "the demo's, drafting as --drafter says). With --simulate: the NAME whose traces are meant, where the file has several",
    )
    what.add_argument(
        "--budgets",
        help=f"draft nodes a pass, besides 0 ({DEFAULT_BUDGETS}; with --simulate the powers of two of the trace)",
    )
    what.add_argument("--repeats", type=_at_least(1), default=1, help="runs of each prompt and budget (%(default)s)")
    what.add_argument(
        "--tau-only",
        action="store_true",
        help="no times: one plain decode a method and prompt, beside which a tree of the largest budget is drafted at every "
        "position; the τ of each budget is replayed from its nodes' ranks",
    )
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="PATH", help="write the results there too")
    results.add_argument("--markdown", metavar="PATH", help="write what is printed there too")
    results.add_argument(
        "--plot",
        metavar="PREFIX",
        help="draw PREFIX-speedup.png (by budget) and PREFIX-phases.png (time of a step), from traces PREFIX-tau.png; with "
        "--simulate the image PREFIX, a .png or .svg",
    )
    results.add_argument("--trace", metavar="PATH", help="record acceptance traces there, as JSON lines")
    _add_model_options(parser)
    _add_sampling(parser, max_tokens=128)
    _add_simulation(parser)


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    simulation = parser.add_argument_group(
        "simulation (nothing is measured, unless by --validate; docs/simulator.md)",
        "What the head whose acceptance is in a trace would give on a device: τ, speed-up and best budget by batch and context.",
    )
    simulation.add_argument("--simulate", metavar="TRACE.jsonl", help="acceptance traces that --trace has written")
    simulation.add_argument(
        "--device-profile",
        metavar="NAME",
        help="h100, h200, b200, a file of --save-profile, or `here`: this machine, calibrated first (h200; with --validate here)",
    )
    simulation.add_argument(
        "--shape", metavar="NAME", help="qwen3-8b or qwen3-30b-a3b, with --head or a public head's shape"
    )
    simulation.add_argument("--batch", default="1,4,16,64", metavar="N,N,...", help="requests at once (%(default)s)")
    simulation.add_argument(
        "--context", default="1024,8192,32768", metavar="N,N,...", help="cached tokens (%(default)s)"
    )
    simulation.add_argument(
        "--kernels",
        choices=["design", "floor"],
        default="design",
        help="of a GPU: what our own take by docs/roofline.md, or what none can beat (%(default)s)",
    )
    simulation.add_argument(
        "--host-ms",
        type=_not_negative,
        default=0.0,
        metavar="MS",
        help="added to every step; 0: CUDA graphs (%(default)s)",
    )
    simulation.add_argument("--save-profile", metavar="PATH", help="write the calibration of this machine there")
    simulation.add_argument(
        "--validate",
        action="store_true",
        help="run the traced prompts of --data too, and hold the prediction to the measurement",
    )


def _add_bench_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ask a server over HTTP from many clients at once. In every round each budget gets the same work in turn, from a server "
        "of this process; with --url a running server is measured as it is. Prints medians with hardware and dtype."
    )
    _add_data(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", default="1,2,4,8,16,32", metavar="N,N,...", help="clients at once (%(default)s)")
    load.add_argument(
        "--rates",
        type=_positive,
        nargs="+",
        metavar="R",
        help="requests a second instead, arriving as a Poisson process",
    )
    load.add_argument(
        "--requests", type=_at_least(1), default=16, metavar="N", help="of a run, or twice the clients (%(default)s)"
    )
    load.add_argument("--rounds", type=_at_least(1), default=3, metavar="N", help="(%(default)s)")
    load.add_argument("--max-tokens", type=_at_least(2), default=64, metavar="N", help="of every answer (%(default)s)")
    load.add_argument(
        "--temperature", type=float, default=0.0, help="0: greedy; request i has the seed i (%(default)s)"
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--budgets", default="0,8,16,32,auto", help="servers to compare (%(default)s)")
    what.add_argument("--url", help="a running server, such as http://127.0.0.1:8000, instead of budgets")
    what.add_argument("--api-key", metavar="KEY", help="for --url")
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="PATH", help="write the results there too")
    results.add_argument("--plot", metavar="PATH", help="draw them there, as .png or .svg")
    _add_model_options(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer every prompt at budget 0 alone, then at each budget and batch size, and count the answers that are the same "
        "token for token. In float32 and with --exact any difference is status 1; in half precision a greedy one is when the "
        "target's own logits say that it was no near-tie, and sampled ones are only counted."
    )
    _add_data(parser)
    parser.add_argument("--budgets", default="16", help="draft nodes a pass (%(default)s)")
    parser.add_argument("--batch", default="1,8", help="prompts that run at once (%(default)s)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (%(default)s)")
    parser.add_argument("--max-tokens", type=_at_least(1), default=128, metavar="N", help="(%(default)s)")
    _add_model_options(parser)


def _add_data(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument("--data", nargs="+", required=required, metavar="FILE.jsonl", help="one workload a file")
    parser.add_argument("--prompts", type=_at_least(1), default=20, help="rows of each file (%(default)s)")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="folder, .gguf file or hub id (the demo, SmolLM2-135M-Instruct)")
    model.add_argument("--head", help="draft head: folder or hub id (the demo's; none for another model)")
    _add_drafting(parser)
    model.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: the checkpoint's, but float32 on a CPU that has to emulate it; GGUF weights are read as bfloat16 first",
    )
    model.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(%(default)s)")
    model.add_argument(
        "--exact",
        action="store_true",
        help="no bit of a result depends on batch or drafts: speculation is lossless in half precision too, at a price in speed",
    )
    limits = parser.add_argument_group("limits (in tokens unless they say otherwise)")
    limits.add_argument(
        "--max-model-len", type=_at_least(1), help="prompt and answer together (what model and cache allow)"
    )
    limits.add_argument("--max-running", type=_at_least(1), help="requests that run at once; others wait")
    limits.add_argument("--max-batch-tokens", type=_at_least(1), help="of one target pass; longer prompts go in chunks")
    limits.add_argument("--num-pages", type=_at_least(1), help="pages of the KV cache (by the limits above and memory)")
    limits.add_argument("--cache-gib", type=float, help="memory for the KV cache in GiB (a share of what is free)")
    limits.add_argument("--page-size", type=_at_least(1), help="slots of a page")
    limits.add_argument(
        "--prefix-cache", action=argparse.BooleanOptionalAction, help="share the pages of equal prefixes (yes)"
    )


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    drafting = parser.add_argument_group("drafting (changes speed, never a token)")
    drafting.add_argument(
        "--drafter",
        choices=["auto", "head", "lookup", "head+lookup"],
        help="lookup: what followed the same words earlier in prompt and answer, for any model; head+lookup: the best of both "
        "(auto: head+lookup where there is a head, else nobody)",
    )
    drafting.add_argument(
        "--draft-passes",
        type=int,
        choices=[1, 2],
        help="2: the head reads the drafted tree once more and grows it again, for causal heads trained with --prefix (1)",
    )
    drafting.add_argument(
        "--draft-depth", type=_at_least(1), metavar="N", help="longest drafted path in tokens (the drafter's)"
    )
    drafting.add_argument(
        "--draft-cutoff",
        type=_probability,
        metavar="P",
        help="draft no path that is less probable than this, even if the budget has room for it (0: draft them all)",
    )
    drafting.add_argument(
        "--draft-temperature",
        type=_positive,
        metavar="T",
        help="drafted probabilities p count as p^(1/T), for drafters that are too sure or too hesitant (the head's own, else 1)",
    )


def _add_budget(parser: argparse.ArgumentParser) -> None:
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument(
        "--budget",
        type=_budget,
        metavar="auto|N",
        help="draft nodes a request and pass; auto: as many as pay at the present load; 0: no speculation (auto with a "
        "drafter, 0 without)",
    )


def _add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument("--max-tokens", type=_at_least(1), default=max_tokens, metavar="N", help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (%(default)s)")
    parser.add_argument("--seed", type=int, help="of sampling (drawn at random)")


def _at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too small: use {minimum} or more")
        return value

    return integer


def _budget(text: str) -> int | str:
    """An argparse type: "auto" or an integer of at least 0."""
    if text == "auto":
        return text
    try:
        return _at_least(0)(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number") from error


def _probability(text: str) -> float:
    """An argparse type: a number in 0 … 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no probability: use 0 to 1")
    return value


def _positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too small: use a number above it")
    return value


def _not_negative(text: str) -> float:
    """An argparse type: a finite number of at least 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} does not do: use a finite number of at least 0")
    return value
