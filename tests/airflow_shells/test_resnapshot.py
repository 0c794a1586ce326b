"""The operators that re-read, drop and ask for approval, on real servers and with a running stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

import tests.support.airflow_support

# isort: split
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import StateUnwritable
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.state import requests
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.operators.approval import CdcApprovalOperator, describe
from airflow_cdc_provider.operators.drop import CdcDropOperator
from airflow_cdc_provider.operators.resnapshot import CdcResnapshotOperator
from airflow_cdc_provider.triggers import request as triggers
from airflow_cdc_provider.triggers.request import RequestTrigger
from tests.conftest import Databases
from tests.support.databases import transaction
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, SparklessRun
from tests.support.streaming import Streaming
from tests.support.threads import Stoppable

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

assert tests.support.airflow_support  # imported before any module of Airflow

DAY = timedelta(days=1)
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
# Thirty rows per day for ten days; writers change other rows meanwhile.
TABLE = (
    "CREATE TABLE public.t (id int PRIMARY KEY, at timestamptz NOT NULL, body text)",
    "CREATE TABLE public.plain (id int PRIMARY KEY, at timestamp, day date)",
    "INSERT INTO public.t SELECT n, timestamptz '2026-01-01 00:00+00' + n * interval '48 minutes', 'row ' || n"
    " FROM generate_series(0, 299) n",
    "INSERT INTO public.plain SELECT id, at AT TIME ZONE 'UTC', at::date FROM public.t",
)


class Store(dict[str, Any]):
    """A task's state store, whose contents survive tries and clearing."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value

    def delete(self, key: str) -> None:
        del self[key]


def context(day: int | None = None, max_tries: int = 0, store: Store | None = None) -> Any:
    """Return the context of a task, in a run whose data interval is one of the ten days, or none."""
    interval = (
        {} if day is None else {"data_interval_start": FIRST + day * DAY, "data_interval_end": FIRST + (day + 1) * DAY}
    )
    return {
        "ti": SimpleNamespace(max_tries=max_tries, try_number=1),
        "task_state_store": Store() if store is None else store,
        **interval,
    }


def first_event(trigger: RequestTrigger) -> dict[str, Any]:
    """Restore a trigger from its serialized form as a triggerer does, and return its first event."""
    path, kwargs = trigger.serialize()
    assert path == "airflow_cdc_provider.triggers.request.RequestTrigger"

    async def fire() -> dict[str, Any]:
        async for event in RequestTrigger(**kwargs).run():
            return dict(event.payload)
        raise AssertionError("no event")

    return asyncio.run(asyncio.wait_for(fire(), 90))


def carry_through(operator: CdcResnapshotOperator, given: Any) -> Any:
    """Run a task to its end, whatever it defers on."""
    work: Callable[[], Any] = lambda: operator.execute(given)  # noqa: E731
    while True:
        try:
            return work()
        except TaskDeferred as e:
            event, kwargs = first_event(e.trigger), dict(e.kwargs or {})
            work = lambda: operator.resume(given, event=event, **kwargs)  # noqa: B023, E731


def deferred(operator: CdcResnapshotOperator, given: Any) -> RequestTrigger:
    """Return the trigger that a task defers on."""
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(given)
    trigger = caught.value.trigger
    assert isinstance(trigger, RequestTrigger)
    return trigger


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineUnderTest:
    monkeypatch.setattr(triggers, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(triggers, "GRACE_SECONDS", 0.3)
    made = PipelineUnderTest(tmp_path, databases, ["public.t", "public.plain"])
    made.source(*TABLE)
    made.provision()
    made.copy_tables()
    made.apply()
    return made


@pytest.fixture
def stream(pipeline: PipelineUnderTest) -> Iterator[Streaming]:
    made = Streaming.begun(pipeline)
    yield made
    if made.is_alive():
        made.end()


def resnapshot(pipeline: PipelineUnderTest, **arguments: Any) -> CdcResnapshotOperator:
    return CdcResnapshotOperator(task_id="resnapshot", pipeline=str(pipeline.file), **arguments)


class Writer(Stoppable):
    """Changes rows of all days except those that a test damages, and adds some."""

    def __init__(self, dsn: str) -> None:
        super().__init__("writer")
        self._dsn = dsn

    def work(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            new = 1000
            while not self._halt.wait(0.01):
                new += 1
                connection.execute(
                    "UPDATE public.t SET body = body || '+' WHERE id %% 3 = 1 AND id %% 30 = %s", [new % 30]
                )
                connection.execute("INSERT INTO public.t VALUES (%s, %s, 'new')", [new, FIRST + (new % 10) * DAY])


@pytest.fixture
def writer(pipeline: PipelineUnderTest) -> Iterator[Writer]:
    made = Writer(pipeline.databases.source)
    made.start()
    yield made
    made.stop()


DAMAGE = (
    "UPDATE public.t SET body = 'damaged' WHERE id < 300 AND id % 6 = 0",
    "DELETE FROM public.t WHERE id < 300 AND id % 6 = 3",
    "INSERT INTO public.t SELECT 10000 + n, timestamptz '2026-01-01 12:00+00' + n * interval '1 day', 'foreign'"
    " FROM generate_series(0, 9) n",
)


def damaged_days(pipeline: PipelineUnderTest) -> list[int]:
    """Return the days on which rows differ that no writer touches."""
    rows = "SELECT id, at, body FROM public.t WHERE id % 3 = 0 AND id < 300 OR id >= 10000"
    source, target = set(pipeline.source_rows(rows)), set(pipeline.target_rows(rows))
    return sorted({(at - FIRST).days for _, at, _ in source ^ target})


def test_five_intervals_at_once_are_healed_and_no_others(
    pipeline: PipelineUnderTest, stream: Streaming, writer: Writer
) -> None:
    pipeline.target(*DAMAGE)
    assert damaged_days(pipeline) == list(range(10))

    def heal(day: int) -> Any:
        return carry_through(resnapshot(pipeline, tables=["public.t"], rows="time", time_column="at"), context(day))

    with ThreadPoolExecutor(5) as pool:
        results = list(pool.map(heal, [6, 5, 4, 3, 2]))
    assert damaged_days(pipeline) == [0, 1, 7, 8, 9]
    assert all(result["rows"] >= 30 and result["tables"] == {"public.t": result["rows"]} for result in results)
    heal(0)
    assert damaged_days(pipeline) == [1, 7, 8, 9]
    carry_through(resnapshot(pipeline), context())
    assert damaged_days(pipeline) == []
    writer.stop()
    stream.end()
    pipeline.apply()
    pipeline.assert_verified()


def test_without_a_stream_the_task_reads_itself_when_nobody_is_in_the_way(pipeline: PipelineUnderTest) -> None:
    pipeline.target(*DAMAGE)
    other = SparklessRun(pipeline.file, "before-reread-commit:pause", reread=("public.plain",))
    other.await_pause()
    operator = resnapshot(pipeline, tables='["public.t"]', rows="key", start="30", end="90")
    trigger = deferred(operator, context())
    assert list((pipeline.state / "requests").glob("*")) == []
    other.resume()
    assert other.wait() == DONE
    assert first_event(trigger)["status"] == "free"
    result = operator.resume(context(), event={"status": "free"}, deadline=None)
    assert result == {"rows": 60, "tables": {"public.t": 60}}
    healed = "SELECT * FROM public.t WHERE id BETWEEN 30 AND 89 ORDER BY id"
    assert pipeline.target_rows(healed) == pipeline.source_rows(healed)
    assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE body = 'damaged'") == [(40,)]


def test_a_request_survives_its_worker_and_is_not_doubled(pipeline: PipelineUnderTest, stream: Streaming) -> None:
    """A retry finds it, and a cleared task makes its own; if the stream has ended, the task reads itself."""
    store, state = Store(), State(pipeline.pipeline.state)
    operator = resnapshot(pipeline, tables=["public.t"])
    with transaction(pipeline.databases.source, "INSERT INTO public.plain VALUES (1000)"):
        first = deferred(operator, context(store=store))
        assert deferred(operator, context(store=store)).request == first.request
        assert state.names("requests") == [f"requests/{first.request}.json"]
        cleared = deferred(operator, context(store=store, max_tries=1))
        assert cleared.request != first.request
        assert len(state.names("requests")) == 2
        other = deferred(resnapshot(pipeline, tables=["public.plain"]), context(store=store, max_tries=1))
        assert other.request not in (first.request, cleared.request)
        # Killed by a user: on the triggerer, and in the worker.
        asyncio.run(first.on_kill())
        assert state.names("requests") == [f"requests/{name}.json" for name in (cleared.request, other.request)]
        stream.end()
    assert first_event(cleared)["status"] == "orphaned"
    store["request"] = {**store["request"], "name": cleared.request}
    assert carry_through(operator, context(store=Store(store), max_tries=1))["rows"] == 300
    assert requests.outcome(state, first.request) is None


@pytest.mark.parametrize(("retry", "rows"), [("retry", 300), ("fail", None)])
def test_what_failed_for_now_is_asked_for_again(pipeline: PipelineUnderTest, retry: str, rows: int | None) -> None:
    given, state = context(store=(store := Store())), State(pipeline.pipeline.state)
    operator = resnapshot(pipeline, tables=["public.t"])
    operator.execute(given)
    error = {"kind": "Blocked", "message": "a lock", "solution": "Wait.", "retry": retry}
    state.write(f"outcomes/{store['request']['name']}.json", {"rows": {}, "error": error, "ended_at": 0.0})
    with pytest.raises(AirflowException, match="a lock"):
        operator.execute(given)
    if rows is None:
        with pytest.raises(AirflowFailException, match="a lock"):
            operator.execute(given)
    else:
        assert operator.execute(given)["rows"] == rows


def test_a_state_that_cannot_be_read_for_a_while_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "LOOK_SECONDS", 0.05)
    path = tmp_path / "state" / "outcomes" / "r.json"
    path.parent.mkdir(parents=True)
    path.symlink_to(path)  # it cannot be read
    trigger = RequestTrigger(str(tmp_path / "state"), "r")

    async def mended() -> dict[str, Any]:
        waiting = asyncio.create_task(anext(trigger.run()))  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        path.unlink()
        path.write_text('{"rows": {}, "ended_at": 1.0}')
        return dict((await asyncio.wait_for(waiting, 60)).payload)

    assert asyncio.run(mended())["status"] == "ended"
    path.unlink()
    path.symlink_to(path)
    monkeypatch.setattr(triggers, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(StateUnwritable):
        first_event(trigger)


def test_a_task_that_may_not_wait_any_longer(pipeline: PipelineUnderTest, stream: Streaming) -> None:
    operator = resnapshot(pipeline, tables=["public.t"], execution_timeout=timedelta(seconds=0.2))
    with transaction(pipeline.databases.source, "INSERT INTO public.plain VALUES (1000)") as session:
        trigger = deferred(operator, context())
        stream.until(
            lambda: bool(pipeline.marker()) and stream.waiting is not None, "what the stream says that it waits for"
        )
        event = first_event(trigger)
        assert State(pipeline.pipeline.state).names("requests") == []
        assert event["status"] == "timeout"
        with pytest.raises(
            AirflowException, match=rf"(?s)session {session.info.backend_pid}.*execution_timeout"
        ) as caught:
            operator.resume(context(), event=event, deadline=trigger.deadline)
        assert not isinstance(caught.value, AirflowFailException)


def test_intervals_of_every_type_of_time(pipeline: PipelineUnderTest) -> None:
    """A time without a zone is UTC. A date is its midnight, so that a shorter interval neither repeats nor skips it."""
    midnight = {"start": "2026-01-03T01:00+01:00", "end": "2026-01-03T01:00:00Z"}
    for table, column, given, day, rows in (
        ("public.t", "at", {}, 3, 30),
        ("public.plain", "at", {}, 3, 30),
        ("public.plain", "day", {}, 3, 30),
        ("public.t", "at", midnight, None, 2),
        ("public.plain", "at", midnight, None, 2),
        ("public.plain", "day", midnight, None, 30),
        ("public.plain", "day", {"start": "2026-01-03T01:00", "end": "2026-01-04T00:00"}, None, 0),
    ):
        operator = resnapshot(pipeline, tables=[table], rows="time", time_column=column, **given)
        assert operator.execute(context(day))["rows"] == rows, (table, column, given)


REFUSED: list[tuple[dict[str, Any], int | None, str]] = [
    ({"tables": ["public.none"]}, 0, "no table 'public.none'"),
    ({"tables": "public.t"}, 0, "tables is 'public.t'"),
    ({"rows": "some"}, 0, "rows is 'some'"),
    ({"rows": "time"}, 0, "no time column"),
    ({"rows": "where"}, 0, "no condition"),
    ({"rows": "where", "where": "nope = 1"}, 0, "nope"),
    ({"rows": "time", "time_column": "nope"}, 0, "public.plain has no column 'nope'.*id, at, day"),
    ({"rows": "time", "time_column": "body", "tables": ["public.t"]}, 0, "is of type text"),
    ({"rows": "time", "time_column": "at"}, None, "no data interval.*triggered manually.*From and To"),
    ({"rows": "time", "time_column": "at", "start": "2026-01-01"}, 0, "only one end"),
    ({"rows": "time", "time_column": "at", "start": "yesterday", "end": "2026-01-01"}, 0, "'yesterday' is not a time"),
    ({"rows": "time", "time_column": "at", "start": "2026-01-02", "end": "2026-01-01"}, 0, "no time between"),
    ({"rows": "key", "start": "", "end": ""}, 0, "no bound"),
    ({"rows": "key", "start": "x"}, 0, "invalid input syntax"),
    ({"rows": "key", "start": "1", "tables": ["public.none"]}, 0, "has copied none of these tables"),
]


def test_what_is_refused_says_why(pipeline: PipelineUnderTest) -> None:
    for arguments, day, message in REFUSED:
        with pytest.raises(AirflowFailException, match=f"(?s){message}"):
            resnapshot(pipeline, **arguments).execute(context(day))
    assert not (pipeline.state / "requests").exists()


def test_drop_says_what_it_does_before(pipeline: PipelineUnderTest) -> None:
    with pytest.raises(ValueError, match="action is 'nothing'"):
        CdcApprovalOperator(task_id="approve", pipeline="", action="nothing")
    asked = CdcApprovalOperator(task_id="approve", pipeline=str(pipeline.file), action="drop", required="False")
    assert asked.execute(context()) is None
    body = describe("drop", commands.status(pipeline.pipeline))
    assert "record in the sink" in body
    assert "* public.t: 300 rows when copied\n" in body
    assert "of log retained, reserved" in body
    drop = CdcDropOperator(task_id="drop", pipeline=str(pipeline.file))
    assert drop.execute(context()) == {"dropped": pipeline.name, "left": []}
    assert sink_of(pipeline.pipeline).record() is None
