"""The result of the last comparison of each table, which ``verify`` leaves in the state."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.state.files import State

_FILE = "verified.json"


@dataclass(frozen=True)
class Verification:
    """The result of the last comparison of a table with its copy.

    :param at: time of its end, in seconds since 1970.
    :param rows: number of rows in the target; the smallest one if there are several sinks.
    :param differences: number of keys that differ, in all sinks.
    :param unsettled: number of keys that kept changing, which do not count as different.
    """

    at: float
    equal: bool
    rows: int
    differences: int
    unsettled: int


def write_verification(state: State, results: Iterable[Mapping[str, Any]]) -> None:
    """Replace the results of the tables that were compared, and keep those of other tables.

    :param results: the ``tables`` of ``verify``; a table has one for each sink.
    """
    found: dict[str, Verification] = {}
    now = round(time.time(), 3)
    for each in results:
        new = Verification(now, each["equal"], each["target_rows"], each["difference_count"], each["unsettled"])
        known = found.get(each["table"], new)
        found[each["table"]] = new if known is new else _joined(known, new)
    if found:
        state.write(
            _FILE, {"tables": {label: asdict(each) for label, each in (read_verification(state) | found).items()}}
        )


def read_verification(state: State) -> dict[str, Verification]:
    """Return the last result of each table that has been compared, by its label."""
    return state.read_sound(_FILE, _as_results) or {}


def _joined(one: Verification, other: Verification) -> Verification:
    return Verification(
        other.at,
        one.equal and other.equal,
        min(one.rows, other.rows),
        one.differences + other.differences,
        one.unsettled + other.unsettled,
    )


def _as_results(values: dict[str, Any]) -> dict[str, Verification]:
    found: dict[str, Verification] = as_type(values["tables"], dict[str, Verification], "tables")
    return found
