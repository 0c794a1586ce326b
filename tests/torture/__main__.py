"""``python -m tests.torture``: torture a pipeline, print events, and print the result."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.torture.ordeal import Report, mode_of, torture


def main(arguments: list[str] | None = None) -> int:
    """Torture a pipeline, and return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of writers and nemesis")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=("mirror", "changelog"), help="chosen by the seed unless given")
    options = parser.parse_args(arguments)
    mode = options.mode or mode_of(options.seed)
    directory = Path(tempfile.mkdtemp(prefix=f"cdc-torture-{options.seed}-"))
    directory.chmod(0o755)
    print(f"seed {options.seed}, {mode}, {options.seconds:g} seconds; logs in {directory}", flush=True)
    report = torture(options.seed, options.seconds, mode, directory, lambda line: print(line, flush=True))
    print(_summary(report), flush=True)
    if report.wrong:
        print("\n".join(["", "WRONG", *report.wrong]))
        print(f"\nLogs: {directory}\nReplay: make torture SECONDS={options.seconds:g} SEED={options.seed} MODE={mode}")
        return 1
    print("Nothing lost, nothing twice, nothing out of order.")
    return 0


def _summary(report: Report) -> str:
    width = max(map(len, report.counts), default=0)
    return "\n".join(["", *(f"{name.ljust(width)}  {value}" for name, value in report.counts.items())])


if __name__ == "__main__":
    sys.exit(main())
