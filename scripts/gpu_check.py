"""Checks every Triton kernel on a GPU against its plain-torch twin, then measures it beside its roofline floor.

    python scripts/gpu_check.py [FOLDER]     from the repository root, `packages/jetflow-triton/src` on PYTHONPATH

Three parts: `check` (results, gradients, the same bits for a row among any number of rows; bfloat16, float16, float32),
`graph` (a decode step captured as a CUDA graph and replayed), `speed` (time of a call against the floor at Qwen3
shapes). Each op of each part runs in a process of its own, so that one which hangs or spoils the GPU's context stops
nothing else. Every line is printed at once; FOLDER gets `gpu_check.json`, complete after every line. What does not fit
`--seconds` is named at the end. Exit status: 0 all right, 1 something is wrong or was not run, 2 no GPU.
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
LONGEST = 200  # seconds that one process may take


def check(op: str, device: str, quick: bool) -> Iterator[Record]:
    """Every comparison of one op."""
    model = gpu_cases.TINY if quick else gpu_cases.CHECKED
    for dtype in gpu_cases.TOLERANCE:
        for case in gpu_cases.cases(op, model, dtype, device):
            record = {"case": f"{str(dtype).removeprefix('torch.')}, {case.name}", "allowed": case.allowed}
            yield record | attempt(lambda case=case: judged(case.run(), case.allowed))


def graph(op: str, device: str, quick: bool) -> Iterator[Record]:
    """A decode step of one kind of model, replayed."""
    model = gpu_cases.TINY if quick else gpu_cases.CHECKED
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16):
        for case in gpu_graph.cases(op, model, dtype, device):
            record = {"case": f"{str(dtype).removeprefix('torch.')}, {case.name}", "allowed": case.allowed}
            yield record | attempt(lambda case=case: judged(case.run(), case.allowed))


def speed(op: str, device: str, quick: bool) -> Iterator[Record]:
    """Time of one call of one op at several shapes, and its floor."""
    sheet = gpu_speed.roofline_device(torch.cuda.get_device_name() if device == "cuda" else "")
    for row in gpu_speed.rows(op, device, quick):
        record = {
            "case": row.name,
            "floor_us": 1e6 * row.cost.floor(sheet),
            "design_us": 1e6 * row.cost.expected(sheet),
        }
        yield record | attempt(lambda row=row: {"us": 1e6 * gpu_speed.seconds_a_call(row, device)})


def judged(error: float, allowed: float) -> Record:
    """The outcome of a comparison."""
    return {"error": error} if error <= allowed else {"error": error, "failure": "the error is too large"}


def attempt(run: Callable[[], Record]) -> Record:
    """What `run` returns, or what it raised; with the seconds that it took."""
    torch.manual_seed(0)
    start = time.monotonic()
    try:
        outcome = run()
    except Exception as error:
        outcome = {"failure": f"{type(error).__name__}: {error}"[:400], "trace": traceback.format_exc(limit=4)}
    return outcome | {"seconds": round(time.monotonic() - start, 2)}


PARTS: dict[str, tuple[Callable[[str, str, bool], Iterator[Record]], tuple[str, ...]]] = {
    "check": (check, tuple(gpu_cases.OPS)),
    "graph": (graph, gpu_graph.KINDS),
    "speed": (speed, tuple(gpu_speed.BUILDERS)),
}


def line_of(record: Record) -> str:
    """A record for the eye."""
    name = f"{record['part']:5s} {record['op']}: {record['case']}"
    if "failure" in record:
        return f"FAILED {name}: {record['failure']} (error {record.get('error')})\n{record.get('trace', '')}".rstrip()
    if record["part"] == "speed":
        return (
            f"       {name}: {record['us']:.1f} us, floor {record['floor_us']:.1f} "
            f"(x {record['us'] / record['floor_us']:.2f}), design {record['design_us']:.1f}"
        )
    return f"ok     {name}: error {record['error']:.1e} of {record['allowed']:.1e}, {record['seconds']:.1f} s"


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
        """The last lines, and the number of failures."""
        failed = [record for record in self.records if "failure" in record]
        counts = ", ".join(f"{part} {sum(r['part'] == part for r in self.records)}" for part in PARTS)
        print(f"\nrecords: {counts}; failed: {len(failed)}")
        for record in failed:
            print(f"  {record['part']} {record['op']}: {record['case']}: {record['failure']}")
        sys.stdout.flush()
        return len(failed)


def run_child(part: str, op: str, options: argparse.Namespace, report: Report, deadline: float) -> None:
    """One op of one part in its own process; its lines go to the report as they come."""
    left = min(LONGEST, deadline - time.monotonic())
    if left <= 0:
        report.add({"part": part, "op": op, "case": "all", "failure": "not run: out of time"})
        return
    command = [sys.executable, __file__, "--child", part, op, "--device", options.device]
    command += ["--quick"] * options.quick
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        clock = threading.Timer(left, process.kill)
        clock.start()
        for line in process.stdout or ():
            if line.startswith("{"):  # anything else is some library's
                report.add(json.loads(line))
        status = process.wait()
        clock.cancel()
        if status:
            errors.seek(0)
            why = f"killed after {left:.0f} s" if status == -9 else f"the process ended with status {status}"
            report.add({"part": part, "op": op, "case": "all", "failure": why, "trace": errors.read()[-1500:]})


def child(part: str, op: str, device: str, quick: bool) -> None:
    """The work of one process: a JSON record a line."""
    torch.set_num_threads(4)
    produce, _ = PARTS[part]
    for record in produce(op, device, quick):
        print(json.dumps({"part": part, "op": op} | record), flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where gpu_check.json goes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the twins stand in")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--only", nargs="+", metavar="OP", help="these ops (or kinds of graph) only")
    parser.add_argument("--part", choices=PARTS, help="this part only")
    parser.add_argument("--seconds", type=float, default=440, help="time for everything (default 440)")
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time, but for the speed part")
    parser.add_argument("--child", nargs=2, metavar=("PART", "OP"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the script."""
    options = parse(arguments)
    if options.child:
        child(*options.child, options.device, options.quick)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No GPU: torch.cuda.is_available() is false, nothing was checked.")
        return 2
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    report = Report(options.folder, about(options.device))
    for part, (_, names) in PARTS.items():
        chosen = [name for name in names if not options.only or name in options.only]
        if options.part in (None, part):
            with ThreadPoolExecutor(1 if part == "speed" else options.jobs) as pool:
                running = [pool.submit(run_child, part, op, options, report, deadline) for op in chosen]
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
