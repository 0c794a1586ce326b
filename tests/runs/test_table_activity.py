"""The counts of what a stream has applied to each table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from airflow_cdc_provider.engine.core.table_operations import TableOperations
from airflow_cdc_provider.engine.runs import table_activity
from airflow_cdc_provider.engine.runs.table_activity import TableActivity
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, read_heartbeat


def test_changes_are_counted_by_operation_and_truncates_are_none() -> None:
    op = np.frombuffer(b"iiudtuu", dtype=np.uint8)

    counted = TableOperations.of(op, np.full(len(op), 5_250_000))

    assert counted == TableOperations(2, 3, 1, 5.25)
    assert TableOperations.of(op[:0], np.zeros(0, dtype=np.int64)) == TableOperations()


def test_totals_continue_in_the_next_stream_and_a_minute_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(table_activity.time, "monotonic", lambda: clock[0])
    first = TableActivity()
    first.add({"a.b": TableOperations(1, 2, 3, 10.0)})
    clock[0] += 30
    first.add({"a.b": TableOperations(1, 0, 0, 20.0), "a.c": TableOperations(0, 1, 0, 20.0)})
    assert [first.as_dict()[table]["per_minute"] for table in ("a.b", "a.c")] == [[2, 2, 3], [0, 1, 0]]
    clock[0] += 31
    assert [first.as_dict()[table]["per_minute"] for table in ("a.b", "a.c")] == [[1, 0, 0], [0, 1, 0]]

    later = TableActivity()
    later.resume(json.loads(json.dumps(first.as_dict())))
    later.add({"a.c": TableOperations(0, 0, 7, 30.0)})

    told = later.as_dict()
    assert {table: [each[kind] for kind in ("inserts", "updates", "deletes")] for table, each in told.items()} == {
        "a.b": [2, 2, 3],
        "a.c": [0, 1, 7],
    }
    assert (told["a.b"]["changed_at"], told["a.c"]["changed_at"]) == (20.0, 30.0)
    assert told["a.b"]["per_minute"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("activity", "readable"),
    [
        (None, True),
        ({"a.b": {"inserts": 1, "updates": 0, "deletes": 0, "changed_at": 1.0, "applied_at": 2.0}}, False),
        ({"a.b": [1]}, False),
    ],
)
def test_heartbeats_without_counts_are_read_and_damaged_counts_are_not(
    tmp_path: Path, activity: object, readable: bool
) -> None:
    progress = {"changes": 1} | ({} if activity is None else {"activity": activity})
    state = State(str(tmp_path))
    state.write("jobs/stream.json", asdict(Heartbeat(Owner.this(), "stream", 1, 1.0, True, progress)))

    assert (read_heartbeat(state, "stream") is not None) is readable
