"""``python -m benchmarks``: measure, check, and print one table.

Exit codes: 0 when all cases ended with the right rows, 1 when one did not, or when the soak's memory or retained log
went beyond its bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from airflow_cdc_provider.engine.errors import CdcError
from benchmarks import kafka, parsing, snapshot, soak, throughput
from benchmarks.report import Series, WrongResult, as_json, as_text, describe_machine
from benchmarks.shapes import Shape

CASES = throughput.DEFAULT
"""What is measured by default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and return the exit code."""
    options = _parser().parse_args(arguments)
    if soak.SOAK in options.cases:
        return _soak(options)
    if parsing.PARSING in options.cases:
        return _parsing(options)
    if kafka.KAFKA in options.cases:
        return _kafka(options)
    load = os.getloadavg()[0]
    shapes = options.shape or [Shape()]
    try:
        series = throughput.measure(
            options.cases or CASES, options.rows, options.repeat, shapes, options.readers or [snapshot.READERS]
        )
    except (WrongResult, CdcError) as e:
        print(f"benchmark failed: {e}", file=sys.stderr)
        return 1
    _show(series, options, "16", load)
    return 0


def _show(series: Sequence[Series], options: argparse.Namespace, version: str, load: float) -> None:
    machine = describe_machine(version, load)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(as_text(series))
    if options.json:
        document = {"machine": machine, "repeat": options.repeat, "cases": as_json(series)}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _kafka(options: argparse.Namespace) -> int:
    load = os.getloadavg()[0]
    try:
        series = kafka.measure(options.rows, options.repeat)
    except (WrongResult, CdcError) as e:
        print(f"benchmark failed: {e}", file=sys.stderr)
        return 1
    _show(series, options, "16", load)
    return 0


def _soak(options: argparse.Namespace) -> int:
    load = os.getloadavg()[0]
    try:
        found = soak.measure(options.seconds, options.rate)
    except (WrongResult, CdcError) as e:
        print(f"benchmark failed: {e}", file=sys.stderr)
        return 1
    print(found.as_text())
    if options.json:
        document = {"machine": describe_machine("16", load), **found.as_dict()}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for fault in found.faults:
        print(f"benchmark failed: {fault}", file=sys.stderr)
    return 1 if found.faults else 0


def _parsing(options: argparse.Namespace) -> int:
    load = os.getloadavg()[0]
    try:
        found = parsing.measure(options.repeat)
    except WrongResult as e:
        print(f"benchmark failed: {e}", file=sys.stderr)
        return 1
    print(found.as_text())
    if options.json:
        document = {"machine": describe_machine("16", load), "repeat": options.repeat, **found.as_dict()}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _case(text: str) -> str:
    known = (*throughput.CASES, kafka.KAFKA, soak.SOAK, parsing.PARSING)
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="case",
        type=_case,
        help=f"some of {', '.join(throughput.CASES)}, by default {', '.join(CASES)};"
        f" or {kafka.KAFKA}; or {soak.SOAK}; or {parsing.PARSING}",
    )
    parser.add_argument("--rows", type=_positive, default=1_000_000, help="rows of the snapshot, changes of the stream")
    parser.add_argument("--repeat", type=_positive, default=3, help="how often each case is measured")
    parser.add_argument(
        "--shape", type=_shape, action="append", help="of a backlog, such as wide or narrow,giant,500-tables"
    )
    parser.add_argument("--readers", type=_positive, nargs="+", metavar="N", help="chunks at a time of a snapshot")
    parser.add_argument("--seconds", type=_positive, default=600, help="how long the soak writes")
    parser.add_argument("--rate", type=_positive, default=2000, help="changes a second that the soak writes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
