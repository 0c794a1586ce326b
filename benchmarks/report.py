"""What a benchmark measured, for people and programs."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import psutil
import pyarrow as pa
import pyspark

from airflow_cdc_provider.engine.core.text_output import text_table


class WrongResult(Exception):
    """A case ended with wrong rows, so its time means nothing."""


class Finding(Protocol):
    """The result of a case that consists of more than the time of some rows."""

    @property
    def name(self) -> str:
        """Return the key of this finding among the figures."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Return the faults found, although every result was right."""

    def as_json(self) -> dict[str, Any]:
        """Return all single figures as JSON values."""

    def as_text(self) -> str:
        """Return the figures as a table."""


@dataclass(frozen=True)
class Series:
    """The repeats of one case.

    :param case: name of the case.
    :param rows: number of rows, or changes, in each repeat.
    :param seconds: duration of each repeat.
    :param peer: the case to compare it with, unless it is a peer itself.
    :param others: further cases to compare it with.
    """

    case: str
    rows: int
    seconds: tuple[float, ...]
    peer: str | None = None
    others: tuple[str, ...] = ()

    @property
    def rates(self) -> list[float]:
        """Return the rows per second of each repeat."""
        return [self.rows / seconds for seconds in self.seconds]


def check(expected: object, found: object, what: str) -> None:
    """Raise an error if a result is wrong.

    :raises WrongResult: with both values if they differ.
    """
    if found != expected:
        raise WrongResult(f"{what}: {found}, but expected {expected}")


def tell(case: str, rows: int, seconds: float) -> None:
    """Print a line of progress."""
    print(f"{case}: {rows:,} rows in {seconds:.2f} s", file=sys.stderr)


def spread(values: Iterable[float], digits: int = 1) -> dict[str, float]:
    """Return median, minimum and maximum of the repeats, rounded."""
    found = list(values)
    return {name: round(of(found), digits) for name, of in (("median", median), ("min", min), ("max", max))}


def describe_machine(postgres: str, load: float) -> dict[str, str | int | float]:
    """Return the facts about this machine on which the figures depend.

    :param load: the load average before anything was started.
    """
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load_before": round(load, 2),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "postgres": postgres,
        "spark": str(pyspark.__version__),
        "pyarrow": str(pa.__version__),
    }


def as_json(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return the cases as JSON values."""
    return [
        {
            "case": each.case,
            "rows": each.rows,
            "seconds": [round(seconds, 3) for seconds in each.seconds],
            "rows_per_second": {
                "median": round(median(each.rates)),
                "min": round(min(each.rates)),
                "max": round(max(each.rates)),
            },
            "peer": each.peer,
            "ratio": _ratio(each, each.peer, series),
            "others": {peer: _ratio(each, peer, series) for peer in each.others},
        }
        for each in series
    ]


def as_text(series: Sequence[Series]) -> str:
    """Return the cases as a table."""
    body = []
    for each in as_json(series):
        rate, ratios = each["rows_per_second"], each["others"]
        if each["peer"]:
            ratios = {each["peer"]: each["ratio"]} | ratios
        body.append(
            [
                each["case"],
                f"{each['rows']:,}",
                f"{rate['median']:,}",
                f"{rate['min']:,}-{rate['max']:,}",
                ", ".join(f"{ratio:.2f} x {peer}" for peer, ratio in ratios.items()),
            ]
        )
    return text_table(["case", "rows", "rows/s", "min-max", "ratio"], body)


def _ratio(series: Series, peer: str | None, all_: Sequence[Series]) -> float | None:
    """Return the median rate as a multiple of a peer's."""
    peers = [other for other in all_ if other.case == peer]
    return round(median(series.rates) / median(peers[0].rates), 3) if peers else None
