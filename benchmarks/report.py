"""What a benchmark measured, for people and for programs."""

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
    """A case ended with other rows than it should have; its time means nothing."""


class Finding(Protocol):
    """What a case found that is more than the time of some rows."""

    @property
    def name(self) -> str:
        """Where it stands among the figures."""

    @property
    def faults(self) -> tuple[str, ...]:
        """What was not as it should be, although every result was right."""

    def as_json(self) -> dict[str, Any]:
        """All single figures as JSON values."""

    def as_text(self) -> str:
        """The figures as a table."""


@dataclass(frozen=True)
class Series:
    """The repeats of one case.

    :param case: its name.
    :param rows: rows, or changes, of each repeat.
    :param seconds: the time of each.
    :param peer: the case that it is compared with, if it is not one of those itself.
    :param others: further cases that it is compared with.
    """

    case: str
    rows: int
    seconds: tuple[float, ...]
    peer: str | None = None
    others: tuple[str, ...] = ()

    @property
    def rates(self) -> list[float]:
        """Rows a second of each repeat."""
        return [self.rows / seconds for seconds in self.seconds]


def check(expected: object, found: object, what: str) -> None:
    """Refuse a run whose result is wrong.

    :raises WrongResult: saying what differs.
    """
    if found != expected:
        raise WrongResult(f"{what}: {found}, but {expected} is right")


def tell(case: str, rows: int, seconds: float) -> None:
    """Show that something goes on."""
    print(f"{case}: {rows:,} rows in {seconds:.2f} s", file=sys.stderr)


def spread(values: Iterable[float], digits: int = 1) -> dict[str, float]:
    """Median, least and greatest of the repeats, rounded."""
    found = list(values)
    return {name: round(of(found), digits) for name, of in (("median", median), ("min", min), ("max", max))}


def describe_machine(postgres: str, load: float) -> dict[str, str | int | float]:
    """What the figures depend on.

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
    """The cases as JSON values."""
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
    """The cases as a table."""
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
    """The median rate as a multiple of a peer's."""
    peers = [other for other in all_ if other.case == peer]
    return round(median(series.rates) / median(peers[0].rates), 3) if peers else None
