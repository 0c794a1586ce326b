"""Rows that are too large to pass through Spark: deposited in the sink, fetched by the task, removed after the commit.

``test_giant.py`` shows the effect on the JVM; here the rows are as small as a deposit can be.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import psycopg
import psycopg2
import pytest

from airflow_cdc_provider.engine.core.errors import LimitExceeded, StagingLost, StreamFailed
from airflow_cdc_provider.engine.postgres.connection import connected, rows
from airflow_cdc_provider.engine.postgres.driver_errors import driver_failure
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import _query_failure
from tests.conftest import Databases
from tests.support.engine_parts import apply_stream
from tests.support.pipelines import PipelineUnderTest

MIB = 1 << 20
LARGE = f"repeat(md5('1'), {17 * MIB >> 5})"


def deposits(dsn: str) -> int:
    """Return the number of deposited pieces in a sink."""
    query = "SELECT count(*) FROM pg_class WHERE relname LIKE 'piece\\_%' AND relkind = 'r'"
    with psycopg.connect(dsn) as connection:
        return int(connection.execute(query).fetchone()[0])  # type: ignore[index]


@pytest.fixture
def deposited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the pieces that are deposited from now on."""
    sizes: list[int] = []
    deposit = PostgresSink.deposit

    def count(sink: PostgresSink, epoch: int, name: str, data: bytes | bytearray) -> None:
        sizes.append(len(data))
        deposit(sink, epoch, name, data)

    monkeypatch.setattr(PostgresSink, "deposit", count)
    return sizes


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    made = PipelineUnderTest(tmp_path, databases, ["public.t"])
    made.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, n int, v text)",
        "ALTER TABLE public.t ALTER v SET STORAGE EXTERNAL",
    )
    return made


CHANGES = (
    f"INSERT INTO public.t SELECT n, 0, n || {LARGE} FROM generate_series(1, 2) n",
    "UPDATE public.t SET n = 1 WHERE id = 1",
    "UPDATE public.t SET id = 3 WHERE id = 2",
    "ALTER TABLE public.t ADD COLUMN further text",
    f"INSERT INTO public.t VALUES (4, NULL, {LARGE}, '')",
    "UPDATE public.t SET v = '\"' || v WHERE id = 4",
    "DELETE FROM public.t WHERE id = 1",
)


@pytest.mark.slow
def test_a_mirror_gets_large_rows(pipeline: PipelineUnderTest, deposited: list[int]) -> None:
    pipeline.provision()
    pipeline.copy()
    pipeline.source(*CHANGES)
    apply_stream(pipeline.pipeline, pipeline.marker())
    pipeline.assert_equal()
    assert len(deposited) == 4
    assert min(deposited) > 17 * MIB
    assert deposits(pipeline.databases.target) == 0


@pytest.mark.slow
def test_a_changelog_gets_large_rows(pipeline: PipelineUnderTest, deposited: list[int]) -> None:
    pipeline.change(sink={"mode": "changelog"})
    pipeline.source("ALTER TABLE public.t REPLICA IDENTITY FULL")
    pipeline.provision()
    pipeline.copy()
    pipeline.source(*CHANGES[:3])
    expected = pipeline.source_rows("SELECT id, n, md5(v) FROM public.t ORDER BY id")
    pipeline.source("DELETE FROM public.t WHERE id = 1")
    apply_stream(pipeline.pipeline, pipeline.marker())
    found = pipeline.target_rows(
        "SELECT _op, id, n, md5(v), md5(_before ->> 'v') FROM public.t ORDER BY _commit_lsn, _seq"
    )
    ((first, _, one), (third, _, two)) = expected
    assert found == [
        ("i", 1, 0, one, None),
        ("i", 2, 0, two, None),
        ("u", first, 1, one, one),
        ("u", third, 0, two, two),
        ("d", 1, None, None, one),
    ]
    assert len(deposited) == 5
    assert deposits(pipeline.databases.target) == 0


def test_what_a_lost_attempt_has_deposited_is_removed(
    pipeline: PipelineUnderTest, deposited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.provision()
    pipeline.copy()
    pipeline.source(CHANGES[0])

    def lose(*_: object) -> None:
        raise StreamFailed("the sink is out of reach", "")

    def fail(*_: object) -> bytearray:
        failing.setattr(PostgresSink, "discard", lose)
        raise StreamFailed("the task is lost", "")

    with monkeypatch.context() as failing:
        failing.setattr(PostgresSink, "fetch", fail)
        with pytest.raises(StreamFailed, match="the task is lost"):
            apply_stream(pipeline.pipeline, pipeline.marker())
    assert 0 < len(deposited) == deposits(pipeline.databases.target)
    apply_stream(pipeline.pipeline, pipeline.marker())
    pipeline.assert_equal()
    assert deposits(pipeline.databases.target) == 0


def test_a_sink_that_fails_while_a_row_is_deposited_is_tried_again(
    pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.provision()
    pipeline.copy()
    pipeline.source(CHANGES[0])

    def fail(sink: PostgresSink, epoch: int, name: str, data: bytes) -> None:
        with connected(sink.dsn) as connection:
            rows(connection, "SELECT pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(PostgresSink, "deposit", fail)
    with pytest.raises(StreamFailed, match=r"depositing 17\.\d MiB of the log in the sink: "):
        apply_stream(pipeline.pipeline, pipeline.marker())


def test_a_deposit_that_a_crash_emptied_is_noticed(databases: Databases) -> None:
    sink = PostgresSink(databases.target, "p", "mirror")
    sink.prepare([], [], {"system": "1"}, 100)
    epoch = sink.take_epoch("test")
    sink.deposit(epoch, "a", b"data")
    with psycopg.connect(databases.target) as connection:
        (name,) = connection.execute("SELECT relname FROM pg_class WHERE relname LIKE 'piece%a'").fetchone() or ("",)
        connection.execute(f"TRUNCATE airflow_cdc.{name}")  # like a crash of the server
    with pytest.raises(StagingLost, match=r"4 bytes was deposited in the sink .*, but 0 were found"):
        sink.fetch(epoch, "a", 4)


def test_a_row_beyond_the_limits_of_postgres_is_no_failure_that_goes_away(databases: Databases) -> None:
    with connected(databases.source) as connection, pytest.raises(psycopg2.Error) as caught:
        rows(connection, "SELECT jsonb_build_array(repeat('x', 300 << 20))")
    error = driver_failure(caught.value, "chunk public.t")
    assert isinstance(error, LimitExceeded)
    said = "a row, or a change of a row, exceeds the limits of Postgres: chunk public.t: string too long to represent"
    assert error.message.startswith(said)
    assert "\n" not in error.message
    # The reader of the slot is a separate process, so its errors arrive as tracebacks.
    trace = "".join(traceback.format_exception(error))
    told = _query_failure(f"[STREAM_FAILED] …\n{trace}\tat org.apache.spark …\n")
    assert isinstance(told, LimitExceeded)
    assert (told.message, told.solution) == (error.message, error.solution)
