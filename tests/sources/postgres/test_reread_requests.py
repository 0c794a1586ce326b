"""Requests for re-reads: how they end, and that no command waits for one that no process carries out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.sources.postgres.reading import reread_requests
from airflow_cdc_provider.engine.state import requests
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.requests import Standing
from tests.conftest import Databases
from tests.support.databases import transaction
from tests.support.pipelines import PipelineUnderTest
from tests.support.streaming import Streaming

pytestmark = pytest.mark.slow


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline that has copied ``public.t`` and ``public.u``, of 10 rows each."""
    made = PipelineUnderTest(tmp_path, databases, ["public.t", "public.u"])
    for table in ("public.t", "public.u"):
        made.source(
            f"CREATE TABLE {table} (id int PRIMARY KEY, body text)",
            f"INSERT INTO {table} SELECT n, 'row ' || n FROM generate_series(1, 10) n",
        )
    made.provision()
    made.copy_tables()
    made.apply()
    return made


@pytest.fixture
def stream(pipeline: PipelineUnderTest) -> Iterator[Streaming]:
    """Return its running stream."""
    made = Streaming.begun(pipeline)
    yield made
    made.end()


def ended(pipeline: PipelineUnderTest, stream: Streaming, name: str) -> dict[str, object]:
    """Wait for the outcome of a request."""
    state = State(pipeline.pipeline.state)
    # A marker creates a unit, before which requests are accepted.
    stream.until(
        lambda: bool(pipeline.marker()) and requests.standing(state, name) is Standing.ENDED, f"the outcome of {name}"
    )
    found = requests.outcome(state, name)
    assert found is not None
    return found


def pass_unit(pipeline: PipelineUnderTest, stream: Streaming) -> None:
    """Wait until the stream has applied everything committed so far."""
    marker = pipeline.marker()
    stream.until(lambda: pipeline.record.applied >= marker, "the next unit")


def test_what_a_request_leaves(pipeline: PipelineUnderTest, stream: Streaming) -> None:
    pipeline.target("DELETE FROM public.t", "UPDATE public.u SET body = 'damaged'")
    left = [
        reread_requests.request(pipeline.pipeline, ["public.t", "public.u"], "id <= 3"),
        reread_requests.request(pipeline.pipeline, ["public.t", "public.u"], "id <= 3"),
        reread_requests.request(pipeline.pipeline, ["public.u", "public.t"], "1 / (id - 11) < 1"),
        reread_requests.request(pipeline.pipeline, ["public.none"], None),
    ]
    found = [ended(pipeline, stream, name) for name in left]
    assert [each["rows"] for each in found] == [
        {"public.t": 3, "public.u": 3},
        {"public.t": 3, "public.u": 3},
        {"public.t": 10, "public.u": 10},
        {},
    ]
    assert all(isinstance(each["ended_at"], float) for each in found)
    assert ["error" in each for each in found] == [False, False, False, True]
    error = found[-1]["error"]
    assert isinstance(error, dict)
    assert (error["kind"], error["retry"]) == ("ConfigError", "fail")
    assert error["solution"]
    pipeline.assert_equal()
    pipeline.assert_equal("public.u")


def test_a_request_that_waits_says_so_and_is_withdrawn(pipeline: PipelineUnderTest, stream: Streaming) -> None:
    state = State(pipeline.pipeline.state)
    pipeline.target("DELETE FROM public.t")
    with transaction(pipeline.databases.source, "INSERT INTO public.u VALUES (100, 'open')") as session:
        name = reread_requests.request(pipeline.pipeline, ["public.t"], None)
        stream.until(lambda: bool(pipeline.marker()) and requests.waiting(state, name) is not None, "what it waits for")
        assert str(session.info.backend_pid) in str(requests.waiting(state, name))
        assert requests.standing(state, name) is Standing.BUSY
        assert requests.withdraw(state, name)
        assert requests.standing(state, name) is Standing.FREE
        pass_unit(pipeline, stream)  # the request may just have been checked
        pass_unit(pipeline, stream)
        session.commit()
    pass_unit(pipeline, stream)
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(0,)]
    assert not requests.withdraw(state, name)
    assert requests.outcome(state, name) is None


def test_a_request_outlives_its_stream(pipeline: PipelineUnderTest) -> None:
    """The next stream carries it out, or its author withdraws it."""
    state = State(pipeline.pipeline.state)
    first, second = (reread_requests.request(pipeline.pipeline, ["public.t"], where) for where in ("id < 3", "id < 2"))
    assert {requests.standing(state, name) for name in (first, second)} == {Standing.ORPHANED}
    pipeline.target("DELETE FROM public.t")
    assert requests.withdraw(state, first)
    result = commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="id < 3", request=first)
    assert result == {"requested": None, "rows": 2, "tables": {"public.t": 2}}
    stream = Streaming(pipeline)
    assert ended(pipeline, stream, second)["rows"] == {"public.t": 1}
    again = commands.resnapshot(pipeline.pipeline, tables=["public.t"], request=first)
    assert again["requested"] == first
    assert ended(pipeline, stream, first)["rows"] == {"public.t": 10}
    stream.end()
    pipeline.assert_equal()


def test_outcomes_are_bounded(pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests that ended first are forgotten, not those that were left first."""
    monkeypatch.setattr(reread_requests, "MOST_OUTCOMES", 4)
    left = [reread_requests.request(pipeline.pipeline, ["public.t"], f"id = {n}") for n in range(4)]
    pipeline.apply()
    oldest = reread_requests.request(pipeline.pipeline, ["public.t"], "id = 3", "1000000000.0-old")
    pipeline.apply()
    assert sorted(path.stem for path in (pipeline.state / "outcomes").iterdir()) == [oldest, left[3]]
    assert json.loads((pipeline.state / f"outcomes/{oldest}.json").read_text())["rows"] == {"public.t": 1}
