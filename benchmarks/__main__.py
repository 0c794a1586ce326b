"""``python -m benchmarks``: measure, check, and print tables.

Exit code 0 means that all cases ended with the right rows. Exit code 1 means that a case did not, or that a case found
a fault, such as memory beyond its bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_cdc_provider.engine.core.errors import CdcError
from benchmarks import (
    floor,
    joins,
    kafka,
    latency,
    parsing,
    scaling,
    snapshot,
    soak,
    startup,
    sustained,
    throughput,
    trigger,
    views,
)
from benchmarks.report import Finding, Series, WrongResult, as_json, as_text, describe_machine
from benchmarks.shapes import Shape
from local_servers.postgres import find_binaries


@dataclass(frozen=True)
class Case:
    """One or more measurements that can be selected by name.

    :param measure: called once with all of its names that were requested.
    """

    measure: Callable[[argparse.Namespace, frozenset[str]], Sequence[Series] | Finding]
    help: str


def _throughput(options: argparse.Namespace, names: frozenset[str]) -> list[Series]:
    shapes, readers = options.shape or [Shape()], options.readers or [snapshot.READERS]
    return throughput.measure(names, options.rows, options.repeat, shapes, readers)


def _sustained(options: argparse.Namespace, _: frozenset[str]) -> Finding:
    return sustained.measure(options.seconds or 300, options.repeat, options.rates or sustained.RATES)


def _latency(options: argparse.Namespace, _: frozenset[str]) -> Finding:
    return latency.measure(options.seconds or 30, options.repeat, options.rates or latency.RATES)


def _scaling(options: argparse.Namespace, _: frozenset[str]) -> Finding:
    return scaling.measure(options.rows, options.repeat, {axis: getattr(options, axis) for axis in scaling.AXES})


CASES = {
    **{name: Case(_throughput, text) for name, text in throughput.CASES.items()},
    latency.LATENCY: Case(_latency, "time from a commit to the row in the mirror, at several rates"),
    floor.FLOOR: Case(lambda options, _: floor.measure(options.batches), "time of the smallest batches, by phase"),
    sustained.SUSTAINED: Case(_sustained, "highest rate that a stream follows for minutes, and its cost"),
    scaling.SCALING: Case(_scaling, "cost of a change with more executors, tables and backlogs"),
    startup.STARTUP: Case(lambda options, _: startup.measure(options.repeat), "time until the first change is applied"),
    trigger.TRIGGER: Case(
        lambda options, _: trigger.measure(options.repeat), "time from the trigger in Airflow to rows and to the end"
    ),
    parsing.PARSING: Case(lambda options, _: parsing.measure(options.repeat), "CPU time of the Dag processor"),
    kafka.KAFKA: Case(
        lambda options, _: kafka.measure(options.rows, options.repeat), "pipelines with topics at either end"
    ),
    views.VIEWS: Case(lambda options, _: views.measure(options.rows, options.repeat), "cost of a wide table as a view"),
    joins.JOINS: Case(lambda options, _: joins.measure(options.rows, options.repeat), "wide tables by other means"),
    soak.SOAK: Case(
        lambda options, _: soak.measure(options.seconds or 600, options.rate),
        "memory and retained log, checked against bounds",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and return the exit code."""
    options = _parser().parse_args(arguments)
    machine = describe_machine(_postgres_version(), os.getloadavg()[0])
    series: list[Series] = []
    findings: list[Finding] = []
    failures: list[str] = []
    for measure, names in _chosen(options.cases).items():
        try:
            found = measure(options, names)
        except (WrongResult, CdcError) as e:
            failures.append(f"{', '.join(sorted(names))}: {e}")
            print(f"benchmark failed: {failures[-1]}", file=sys.stderr)
            continue
        if isinstance(found, Sequence):
            series += found
        else:
            findings.append(found)
            failures += found.faults
            for fault in found.faults:
                print(f"benchmark failed: {fault}", file=sys.stderr)
    _show(series, findings, machine)
    if options.json:
        document = {
            "machine": machine,
            "repeat": options.repeat,
            "failures": failures,
            "cases": as_json(series),
            "findings": {each.name: each.as_json() for each in findings},
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


def _chosen(names: Sequence[str]) -> dict[Callable[..., Sequence[Series] | Finding], frozenset[str]]:
    """Group the requested names by the function that measures them, in the order of the table."""
    chosen: dict[Callable[..., Sequence[Series] | Finding], frozenset[str]] = {}
    for name, case in CASES.items():
        if name in names:
            chosen[case.measure] = chosen.get(case.measure, frozenset()) | {name}
    return chosen


def _postgres_version() -> str:
    told = subprocess.run([find_binaries("16") / "postgres", "--version"], capture_output=True, text=True, check=True)
    return told.stdout.split()[-1]


def _show(series: Sequence[Series], findings: Sequence[Finding], machine: dict[str, Any]) -> None:
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if series:
        print(as_text(series))
    for each in findings:
        print(f"\n{each.name}\n{each.as_text()}")


def _case(text: str) -> str:
    if text not in CASES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(CASES)}")
    return text


def _shape(text: str) -> Shape:
    try:
        return Shape.parse(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _parser() -> argparse.ArgumentParser:
    table = "\n".join(f"  {name:25}{case.help}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{(__doc__ or '').splitlines()[0]}\n\ncases:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="+", metavar="case", type=_case, help="case to measure, see below")
    parser.add_argument("--rows", type=_positive, default=1_000_000, help="rows of the snapshot, changes of the stream")
    parser.add_argument("--repeat", type=_positive, default=3, help="number of times to measure each case")
    parser.add_argument(
        "--shape", type=_shape, action="append", help="shape of a backlog, such as wide or narrow,giant,500-tables"
    )
    parser.add_argument("--readers", type=_positive, nargs="+", metavar="N", help="chunks of a snapshot at a time")
    parser.add_argument(
        "--seconds", type=_positive, help="duration of a run of latency (30), sustained (300) or soak (600)"
    )
    parser.add_argument("--rate", type=_positive, default=2000, help="changes per second for soak")
    parser.add_argument(
        "--rates", type=_positive, nargs="+", metavar="RATE", help="rates per second for sustained or latency"
    )
    parser.add_argument("--batches", type=_positive, default=40, help="batches of each kind for floor")
    for axis, points in scaling.AXES.items():
        shown = f"points of scaling: {' '.join(map(str, points))}"
        parser.add_argument(f"--{axis}", type=_positive, nargs="*", default=points, metavar="N", help=shown)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
