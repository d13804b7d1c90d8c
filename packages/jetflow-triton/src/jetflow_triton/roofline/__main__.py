"""`python -m jetflow_triton.roofline` prints the sheet; `--csv` every row of it."""

from __future__ import annotations

import argparse
import os
import sys

from jetflow_triton.roofline.sheet import csv, markdown


def main() -> None:
    """Prints to the standard output."""
    parser = argparse.ArgumentParser(prog="python -m jetflow_triton.roofline", description=__doc__)
    parser.add_argument("--csv", action="store_true", help="every model, load and op, a line each")
    lines = csv() if parser.parse_args().csv else markdown()
    try:
        sys.stdout.writelines(line + "\n" for line in lines)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; Python must not try to flush again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
