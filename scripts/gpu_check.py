"""Checks every Triton kernel on a GPU against its plain-torch twin, then measures it beside its roofline floor.

    python scripts/gpu_check.py [FOLDER]     from the repository root, `packages/jetflow-triton/src` on PYTHONPATH

Parts: `check` (results, gradients, the same bits for a row among any number of rows; bfloat16, float16, float32), `graph`
(a decode step captured as a CUDA graph and replayed), `compile` and `speed` (time of a call beside the floor at Qwen3
shapes). The work is done by child processes: one that hangs, dies or spoils the GPU's context costs the op it was at, and
the rest goes on. Every line is printed at once; FOLDER gets `gpu_check.json`, complete after every line. What does not
fit `--seconds` is named. Exit status: 0 all right, 1 something is wrong or was not run, 2 no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu_cases
import gpu_graph
import gpu_speed
import torch

Record = dict[str, Any]
SILENCE = 100  # seconds without a line after which a process counts as hung
SPOILED = 3  # exit status of a process whose GPU context is lost


def check(name: str, device: str, quick: bool) -> Iterator[Record]:
    """Every comparison of one op in one dtype."""
    op, dtype = name.split()
    model = gpu_cases.TINY if quick else gpu_cases.CHECKED
    for case in gpu_cases.cases(op, model, getattr(torch, dtype), device):
        yield {"case": case.name, "allowed": case.allowed} | attempt(lambda case=case: judged(case))


def graph(name: str, device: str, quick: bool) -> Iterator[Record]:
    """A decode step of one kind of model in one dtype, replayed."""
    kind, dtype = name.split()
    model = gpu_cases.TINY if quick else gpu_cases.CHECKED
    for case in gpu_graph.cases(kind, model, getattr(torch, dtype), device):
        yield {"case": case.name, "allowed": case.allowed} | attempt(lambda case=case: judged(case))


def speed(name: str, device: str, quick: bool) -> Iterator[Record]:
    """Time of one call of one op at several shapes, and its floor."""
    sheet = gpu_speed.roofline_device(torch.cuda.get_device_name() if device == "cuda" else "")
    for row in gpu_speed.rows(name, device, quick):
        limits = {"floor_us": 1e6 * row.cost.floor(sheet), "design_us": 1e6 * row.cost.expected(sheet)}
        measured = attempt(lambda row=row: {"us": 1e6 * gpu_speed.seconds_a_call(row, device)})
        yield {"case": row.name} | limits | measured


def compile_rows(name: str, device: str, quick: bool) -> Iterator[Record]:
    """Runs each shape of an op once, so that `speed`, which measures alone, finds its kernels compiled."""

    def run() -> Record:
        for row in gpu_speed.rows(name, device, quick):
            row.build()()
        if device == "cuda":
            torch.cuda.synchronize()
        return {}

    yield {"case": "runs at every shape"} | attempt(run)


def judged(case: gpu_cases.Case) -> Record:
    """The outcome of a comparison."""
    error = case.run()
    return {"error": error} if error <= case.allowed else {"error": error, "failure": "the error is too large"}


def attempt(run: Callable[[], Record]) -> Record:
    """What `run` returns, or what it raised; with the seconds that it took."""
    torch.manual_seed(0)
    start = time.monotonic()
    try:
        outcome = run()
    except Exception as error:
        outcome = {"failure": f"{type(error).__name__}: {error}"[:400], "trace": traceback.format_exc(limit=4)}
    return outcome | {"seconds": round(time.monotonic() - start, 2)}


PARTS: dict[str, Callable[[str, str, bool], Iterator[Record]]] = {
    "check": check,
    "graph": graph,
    "compile": compile_rows,
    "speed": speed,
}
STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("check", tuple(f"{op} bfloat16" for op in gpu_cases.OPS)),
    ("graph", tuple(f"{kind} {dtype}" for dtype in ("bfloat16", "float16") for kind in gpu_graph.KINDS)),
    ("compile", tuple(gpu_speed.BUILDERS)),
    ("speed", tuple(gpu_speed.BUILDERS)),
    ("check", tuple(f"{op} {dtype}" for dtype in ("float16", "float32") for op in gpu_cases.OPS)),
)
"""What is done, the most telling first."""


def line_of(record: Record) -> str:
    """A record for the eye."""
    name = f"{record['part']} {record['name']}: {record['case']}"
    if "failure" in record:
        return f"FAILED {name}: {record['failure']} (error {record.get('error')})\n{record.get('trace', '')}".rstrip()
    if record["part"] == "speed":
        return (
            f"       {name}: {record['us']:.1f} us, floor {record['floor_us']:.1f} "
            f"(x {record['us'] / record['floor_us']:.2f}), design {record['design_us']:.1f}"
        )
    error = f"error {record['error']:.1e} of {record['allowed']:.1e}, " if "error" in record else ""
    return f"ok     {name}: {error}{record['seconds']:.1f} s"


class Report:
    """Prints each record as it comes, and keeps them all."""

    def __init__(self, folder: Path | None, about: Record) -> None:
        self.records: list[Record] = []
        self._lock = threading.Lock()
        self._path = folder / "gpu_check.json" if folder else None
        self._about = about
        print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)

    def add(self, record: Record) -> None:
        """Takes one record; may be called from any thread."""
        with self._lock:
            self.records.append(record)
            print(line_of(record), flush=True)
            if self._path:
                self._path.write_text(json.dumps({"about": self._about, "records": self.records}, indent=1))

    def close(self) -> int:
        """The table of times in Markdown, the last lines, and the number of failures."""
        print("\n".join(self._table()))
        failed = [record for record in self.records if "failure" in record]
        counts = ", ".join(f"{part} {sum(r['part'] == part for r in self.records)}" for part in PARTS)
        print(f"\nrecords: {counts}; failed: {len(failed)}")
        for record in failed:
            print(f"  {record['part']} {record['name']}: {record['case']}: {record['failure']}")
        sys.stdout.flush()
        return len(failed)

    def _table(self) -> Iterator[str]:
        rows = [record for record in self.records if "us" in record]
        if rows:
            yield "\n| op | one call of | µs | floor µs | times the floor | design µs |\n|---|---|--:|--:|--:|--:|"
        for row in rows:
            cells = (
                f"{row['us']:.1f} | {row['floor_us']:.1f} | {row['us'] / row['floor_us']:.2f} | {row['design_us']:.1f}"
            )
            yield f"| {row['name']} | {row['case']} | {cells} |"


def run_names(part: str, names: list[str], options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Works through `names` in one process; when it fails at one of them, in another one behind that."""
    while names:
        if deadline <= time.monotonic():
            for name in names:
                report.add({"part": part, "name": name, "case": "all", "failure": "not run: out of time"})
            return
        reached, failure, trace = run_child(part, names, options, report, deadline)
        if failure:
            report.add({"part": part, "name": reached, "case": "all", "failure": failure, "trace": trace})
            names = names[names.index(reached) + 1 :]
        else:
            names = []


def run_child(
    part: str, names: list[str], options: argparse.Namespace, report: Report, deadline: float
) -> tuple[str, str, str]:
    """One process; its lines go to the report as they come. Returns the name it came to, what went wrong, its last words."""
    command = [sys.executable, __file__, "--child", part, *names, "--device", options.device]
    command += ["--quick"] * options.quick
    reached = names[0]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        clock = start_clock(process, deadline)
        for line in process.stdout or ():
            clock.cancel()
            clock = start_clock(process, deadline)
            if line.startswith("{"):  # anything else is some library's
                record = json.loads(line)
                reached = record["name"]
                if "case" in record:
                    report.add(record)
        status = process.wait()
        clock.cancel()
        errors.seek(0)
        trace = errors.read()[-1500:]
    reasons = {0: "", SPOILED: "the GPU context was lost", -9: "killed: silent for too long, or out of time"}
    return reached, reasons.get(status, f"the process ended with status {status}"), trace


def start_clock(process: subprocess.Popen[str], deadline: float) -> threading.Timer:
    """Kills the process unless it is cancelled in time."""
    clock = threading.Timer(min(SILENCE, deadline - time.monotonic()), process.kill)
    clock.start()
    return clock


def child(part: str, names: list[str], device: str, quick: bool) -> None:
    """The work of one process: a JSON object a line, first of each name one without a case."""
    torch.set_num_threads(2)
    for name in names:
        print(json.dumps({"name": name}), flush=True)
        for record in PARTS[part](name, device, quick):
            print(json.dumps({"part": part, "name": name} | record), flush=True)
            if device == "cuda" and "failure" in record:
                try:
                    torch.cuda.synchronize()
                except RuntimeError:
                    sys.exit(SPOILED)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where gpu_check.json goes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the twins stand in")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="names with one of these words, as tree_attention")
    parser.add_argument("--part", choices=PARTS, help="this part only")
    parser.add_argument("--seconds", type=float, default=440, help="time for everything (default 440)")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time, but for the speed part (default 8)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the script."""
    options = parse(arguments)
    if options.child:
        child(options.child[0], options.child[1:], options.device, options.quick)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No GPU: torch.cuda.is_available() is false, nothing was checked.")
        return 2
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    report = Report(options.folder, about(options.device))
    for part, names in STAGES:
        chosen = [name for name in names if not options.only or set(name.split()) & set(options.only)]
        if chosen and options.part in (None, part):
            jobs = 1 if part == "speed" else min(options.jobs, len(chosen))
            with ThreadPoolExecutor(jobs) as pool:
                shares = [chosen] if jobs == 1 else [[name] for name in chosen]
                running = [pool.submit(run_names, part, share, options, report, deadline) for share in shares]
            for one in running:
                one.result()  # raises our own errors
    return 1 if report.close() else 0


def about(device: str) -> Record:
    """What was run on."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "triton": triton, "python": sys.version.split()[0]}


if __name__ == "__main__":
    sys.exit(main())
