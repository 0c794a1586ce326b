"""The reports of jobs over time: bounded, continued, and never an obstacle to the job."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ConnectionFailed
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.history import (
    BATCHES,
    ERRORS,
    KEPT_SECONDS,
    SAMPLES,
    History,
    HistoryEntry,
    extended,
    read_history,
    thin,
)

NOW = 1.8e9
RECENT_SECONDS = 20 * 60.0


def sampled(*ages: float) -> list[HistoryEntry]:
    return [{"at": NOW - age, "rows_per_second": 1} for age in sorted(ages, reverse=True)]


@given(st.lists(st.lists(st.floats(0, 2 * KEPT_SECONDS), max_size=1500), max_size=3))
def test_thinned_samples_are_bounded_and_cover_minutes_and_days(ages: list[list[float]]) -> None:
    series = [sampled(*some) for some in ages] + [sampled(0.0)]
    kept = thin(series)
    at = [sample["at"] for sample in kept]
    assert len(kept) <= SAMPLES
    assert at[-1] == NOW
    assert at == sorted(at)
    assert [sample["at"] for sample in thin([kept])] == at
    # Every omitted report has a neighbor that is as near as its age requires.
    for sample in (sample for samples in series for sample in samples):
        age = NOW - sample["at"]
        if age <= KEPT_SECONDS:
            assert min(abs(sample["at"] - other) for other in at) <= max(10.0, age / 30)


def test_samples_that_are_thinned_again_and_again_have_no_holes() -> None:
    every = [{"at": NOW + 10.0 * i, "rows_per_second": 0} for i in range(8 * 8640)]
    kept: list[HistoryEntry] = []
    for i in range(0, len(every), 240):
        kept = thin([[*kept, *every[i : i + 240]]])
    now = every[-1]["at"]
    assert [sample for sample in every if sample["at"] > now - RECENT_SECONDS] == kept[-120:]
    assert now - kept[0]["at"] > 0.99 * KEPT_SECONDS
    assert all(b["at"] - a["at"] <= max(10.0, (now - a["at"]) / 30) for a, b in itertools.pairwise(kept))
    assert 600 < len(kept) <= SAMPLES


def test_parts_that_run_at_the_same_time_are_summed() -> None:
    kept = thin([sampled(31, 22, 12, 2), sampled(21, 1), sampled(3)])
    assert [(NOW - sample["at"], sample["rows_per_second"]) for sample in kept] == [(31, 1), (21, 2), (12, 1), (1, 3)]


def test_a_file_is_bounded_and_tells_a_repeated_error_once() -> None:
    def error(at: int, message: str) -> HistoryEntry:
        return {"at": at, "part": "stream", "kind": "ConnectionFailed", "message": message, "solution": "Wait."}

    file = None
    for at in range(100):
        errors = [error(at, "down") if at < 50 else error(at, f"down {at}")]
        file = extended(file, {"samples": [], "batches": [{"at": at}, {"at": at}], "errors": errors})
        if at == 49:
            assert [(e["at"], e["count"]) for e in file["errors"]] == [(49, 50)]
    assert file is not None
    assert [batch["at"] for batch in file["batches"]] == sorted(2 * list(range(75, 100)))
    assert len(file["batches"]) == BATCHES
    assert [e["message"] for e in file["errors"]] == [f"down {at}" for at in range(80, 100)]
    assert len(file["errors"]) == ERRORS


def test_a_job_continues_the_file_of_the_one_before_and_leaves_that_of_a_later_one(tmp_path: Path) -> None:
    state = State(f"file://{tmp_path}")
    assert read_history(state) == {"samples": [], "batches": [], "errors": []}
    overtaken, latest, snapshot = (
        History(state, part, epoch) for part, epoch in (("stream", 1), ("stream", 2), ("snapshot-0", 2))
    )
    slot = {"restart_lsn": "0/1", "confirmed_flush_lsn": "0/2", "retained_bytes": 3, "active": True}
    for changes, job in enumerate((overtaken, latest, overtaken), 1):
        job.batch(changes, 0.5, changes << 32)
        job.sample(
            {"changes": changes, "applied_lsn": f"{changes}/0", "lag_bytes": 7, "lag_seconds": 1.5, "slot": slot}
        )
        job.write()
    snapshot.error(ConnectionFailed("the source is down", "Wait."))
    snapshot.write()
    failed = History(state, "stream")  # before it had an epoch
    failed.error(ConnectionFailed("the sink is down", "Wait."))
    failed.write()

    found = read_history(state)
    assert [(b["part"], b["changes"], b["seconds"], b["end_lsn"]) for b in found["batches"]] == [
        ("stream", 1, 0.5, "1/0"),
        ("stream", 2, 0.5, "2/0"),
    ]
    assert [e["message"] for e in found["errors"]] == ["the source is down", "the sink is down"]
    assert found["samples"][-1] | {"at": 0, "rows_per_second": 0} == {
        "at": 0, "applied_lsn": "2/0", "lag_bytes": 7, "lag_seconds": 1.5, "rows_per_second": 0,
        "restart_lsn": "0/1", "confirmed_flush_lsn": "0/2", "retained_bytes": 3,
    }  # fmt: skip


def test_what_cannot_be_written_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "history").write_text("in the way")
    state = State(f"file://{tmp_path}")
    job = History(state, "stream", 1)
    with caplog.at_level(logging.WARNING):
        for changes in (1, 2):
            job.batch(changes, 0.1, changes)
            job.write()
    assert len(caplog.records) == 1
    (tmp_path / "history").unlink()
    job.write()
    assert [batch["changes"] for batch in read_history(state)["batches"]] == [1, 2]
