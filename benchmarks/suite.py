"""``python -m benchmarks.suite [run …]``: measure everything in ``docs/benchmarks.md`` at full size.

A run is a process of ``python -m benchmarks`` for cases that are compared with each other; it writes its figures into a
file with its name. All runs together take some hours, during which the machine should do nothing else. So each can be
started separately, and the page is written from the figures that exist.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_SHAPES = ("narrow", "1-kb", "wide", "toasted", "single", "giant", "500-tables")

RUNS = {
    "streams": "stream-noop stream-parquet stream-mirror stream-files stream-kafka subscription"
    " debezium-count debezium-warm debezium-json --rows 2000000",
    "updates": "stream-mirror subscription debezium-count debezium-warm --shape updates --rows 2000000",
    "sinks": "stream-changelog stream-delta stream-delta-changelog stream-mysql debezium-count flink-cdc --rows 500000",
    "shapes": f"stream-noop stream-mirror subscription --rows 400000 --shape {' --shape '.join(_SHAPES)}",
    "tables": "stream-mirror --rows 400000 --shape thousand --shape 500-tables",
    "snapshots": "snapshot snapshot-files pg_dump spark-jdbc spark-jdbc-parquet --readers 1 2 4 --rows 10000000"
    " --repeat 2",
    "snapshot-sinks": "snapshot-changelog snapshot-delta snapshot-delta-changelog snapshot-mysql snapshot-kafka"
    " debezium-snapshot --readers 1 2 4 --rows 10000000 --repeat 1",
    "large-table": "snapshot snapshot-files pg_dump --shape 1-kb --rows 18000000 --repeat 1",
    "topics": "kafka --rows 500000",
    "planning": "planning --rows 100000000",
    "concurrent-load": "concurrent-load --rows 4000000",
    "latency": "latency",
    "floor": "floor",
    "sustained": "sustained --repeat 1",
    "scaling": "scaling",
    "startup": "startup",
    "trigger": "trigger --repeat 5",
    "views": "views --rows 1000000",
    "joins": "joins --rows 1000000",
    "parsing": "parsing --repeat 5",
    "soak": "soak",
}
"""Arguments of each run."""

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the page, and return 1 if a run has failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="run", type=_run, help=f"any of {', '.join(RUNS)}; by default all")
    chosen = parser.parse_args(arguments).runs or list(RUNS)
    failed = []
    for name in chosen:
        print(f"\n{name}: python -m benchmarks {RUNS[name]}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks", *RUNS[name].split(), "--json", str(FOLDER / f"{name}.json")]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    measured = [str(file) for name in RUNS if (file := FOLDER / f"{name}.json").exists()]
    subprocess.run([sys.executable, "-m", "benchmarks.docs", *measured], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(text: str) -> str:
    if text not in RUNS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(RUNS)}")
    return text


if __name__ == "__main__":
    sys.exit(main())
