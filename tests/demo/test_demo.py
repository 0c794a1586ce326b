"""The parts of the demo that need no servers; continuous integration runs the demo itself."""

from __future__ import annotations

import io
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from demo.__main__ import TOPICS, main
from demo.screen import Screen, clock
from demo.tables import PIPELINE, Course, Outcome, ShopMoment, summary
from demo.work_directory import DemoFailed, work_directory, write_pipeline
from tests.support.demo_run import NEW, task

COPYING: Mapping[str, Any] = {
    **NEW,
    "state": "snapshotting",
    "applied_lsn": "0/1000000",
    "lag_bytes": 3 << 20,
    "lag_seconds": 12.34,
    "slot": {"restart_lsn": "0/FFFF00", "retained_bytes": 4 << 20},
    "tables": [
        {"table": "shop.orders", "chunks": 5, "finished": 2, "rows": 200},
        {"table": "shop.events", "chunks": 3, "finished": 3, "rows": 300},
    ],
    "jobs": [
        {"part": "snapshot-0", "rows_per_second": 30_000},
        {"part": "snapshot-1", "rows_per_second": 12_345},
        {"part": "stream"},
    ],
}


STREAMING: Mapping[str, Any] = {
    **COPYING,
    "state": "streaming",
    "consistent": True,
    "applied_lsn": "0/2000000",
    "slot": {"restart_lsn": "0/1F00000", "retained_bytes": 1 << 20},
    "tables": [{"table": "shop.orders", "chunks": 8, "finished": 8, "rows": 500}],
    "jobs": [],
}


COPYING_TASKS = [
    task("preflight", "success"),
    task("snapshot", "running", 0),
    task("snapshot", "running", 1),
    task("slot_progress", "up_for_reschedule"),
    task("stream", None),
]


VERIFIED: Mapping[str, Any] = {
    "equal": True,
    "tables": [
        {"table": "shop.orders", "source_rows": 1200, "target_rows": 1200, "equal": True},
        {"table": "shop.events", "source_rows": 34, "target_rows": 34, "equal": True},
    ],
    "not_compared": [],
}


COURSE = Course(
    start=ShopMoment(COPYING, "running", COPYING_TASKS, 10),
    live=[ShopMoment({**STREAMING, "lag_seconds": lag}, "running", [], 20) for lag in (7.0, 0.4, 0.5)],
    end=ShopMoment(STREAMING, "success", [task("stream", "success", try_number=2)], 54_321),
)


OUTCOME = Outcome(
    course=COURSE,
    verified=VERIFIED,
    jobs={
        "snapshot-0": {"rows": 600, "seconds": 2.0},
        "snapshot-1": {"rows": 500, "seconds": 1.5},
        "stream": {"changes": 900, "seconds": 3.0},
    },
    seconds=185.0,
)


def test_a_line_tells_what_is_at_work_and_what_it_costs() -> None:
    assert ShopMoment(NEW, "queued", [], 7).line == "Dag run queued · 7 transactions"
    assert ShopMoment(COPYING, "running", COPYING_TASKS, 12_345).line == (
        "snapshot ×2, slot_progress · 5 of 8 chunks · 42,345 rows/s · lag 3.0 MiB, 12.3 s · slot keeps 4.0 MiB"
        " · 12,345 transactions"
    )


def test_a_task_that_waits_is_told_from_one_that_works() -> None:
    tasks = [task("snapshot", "up_for_retry", 0), task("snapshot", "queued", 1), task("plan", "failed")]

    assert ShopMoment(NEW, "running", tasks, 0).activity == "snapshot (waiting for a retry), snapshot (queued)"


@pytest.mark.parametrize(
    ("status", "copied", "live"),
    [
        (NEW, False, False),
        (COPYING, False, False),
        (STREAMING, True, True),
        ({**STREAMING, "state": "stopped"}, True, False),
    ],
)
def test_a_moment_knows_how_far_the_copy_is(status: Mapping[str, Any], copied: bool, live: bool) -> None:
    moment = ShopMoment(status, "running", [], 0)

    assert (moment.copied, moment.live) == (copied, live)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_rewritten_on_a_terminal_and_rare_elsewhere() -> None:
    terminal, file = Terminal(), io.StringIO()
    first, second = ShopMoment(NEW, "queued", [], 1), ShopMoment(NEW, "running", COPYING_TASKS, 3)

    for out in (terminal, file):
        screen = Screen(out)
        for moment in (first, replace(second, transactions=2), second):
            screen.show(moment)
        screen.say("Done.")

    assert terminal.getvalue().count("\r\x1b[K") == 4
    assert terminal.getvalue().count("\n") == 1
    assert [line.split(" · ")[-1] for line in file.getvalue().splitlines()] == ["2 transactions", "0:00  Done."]


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0:00"), (65, "1:05"), (605.5, "10:05")])
def test_time_is_minutes_and_seconds(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_summary_shows_tables_speed_and_slot() -> None:
    lines = summary(OUTCOME).splitlines()

    assert OUTCOME.problems == []
    assert [line.split() for line in lines if line.startswith(("shop.", "together"))] == [
        ["shop.orders", "1,200", "1,200", "yes"],
        ["shop.events", "34", "34", "yes"],
        ["together", "1,234", "1,234", "yes"],
    ]
    assert "snapshot    1,100 rows in 2.0 s, 550 rows/s" in lines
    assert "stream      900 row changes in 3.0 s of work, 300 rows/s" in lines
    assert "live        0.5 s behind the writers (median)" in lines
    assert "slot        restart_lsn from 0/FFFF00 to 0/1F00000, keeps 1.0 MiB of log" in lines
    assert "Dag run     success, 1 tasks, stream needed 2 tries" in lines


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"verified": {**VERIFIED, "equal": False, "tables": [{"table": "shop.orders", "equal": False}]}}, "differ in"),
        ({"verified": {**VERIFIED, "tables": []}}, "not compared: all"),
        ({"verified": {**VERIFIED, "not_compared": ["shop.log"]}}, "not compared: shop.log"),
        ({"course": replace(COURSE, end=replace(COURSE.end, run="failed"))}, "ended as failed"),
        ({"course": replace(COURSE, end=replace(COURSE.end, status=COPYING))}, "was 0/FFFF00 and is 0/FFFF00"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], problem: str) -> None:
    (found,) = replace(OUTCOME, **change).problems

    assert problem in found


def test_the_pipeline_file_has_ten_lines_and_no_address(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, "shop", PIPELINE, sink="  conn_id: shop_target\n  mode: mirror\n")
    source, target = "postgresql://a@127.0.0.1:1/shop", "postgresql://a@127.0.0.1:2/warehouse"

    pipeline = Pipeline.load(path, {"AIRFLOW_CONN_SHOP_SOURCE": source, "AIRFLOW_CONN_SHOP_TARGET": target})

    assert len(path.read_text().splitlines()) == 10
    assert (pipeline.source.dsn, pipeline.sink.dsn, pipeline.state) == (source, target, f"file://{tmp_path}/state")


def test_a_chosen_directory_stays_and_must_be_empty(tmp_path: Path) -> None:
    with work_directory(tmp_path / "new") as directory:
        (directory / "file").touch()

    assert (tmp_path / "new" / "file").exists()
    with pytest.raises(DemoFailed, match="is not empty"), work_directory(tmp_path / "new"):
        pass


def test_a_temporary_directory_is_open_to_the_user_of_the_servers_and_removed() -> None:
    with work_directory(None) as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755

    assert not directory.exists()


@pytest.mark.parametrize("pipeline", TOPICS)
def test_only_the_shop_is_copied_to_a_choice_of_stores(pipeline: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--pipeline", pipeline, "--sink", "mysql"])

    assert ended.value.code == 2
    assert f"--sink applies only to the shop; the name {pipeline}" in capsys.readouterr().err
