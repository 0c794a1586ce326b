"""Transactions of unusual kinds: prepared ones, very many tiny ones in a batch, and those that are rolled back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest

from airflow_cdc_provider.engine.core.errors import Blocked
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.sources.postgres.provision import slot
from airflow_cdc_provider.engine.sources.postgres.stream.spark_source import SlotStreamReader
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from tests.conftest import SESSION_SETTINGS, Databases, ServerMaker
from tests.support.databases import execute, query_rows, transaction
from tests.support.engine_parts import apply_stream
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

Mode = Literal["mirror", "changelog"]

TABLE = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t SELECT n, 'row' FROM generate_series(1, 20) n")


def prepare(dsn: str, name: str, *statements: str) -> None:
    """Leave a prepared transaction."""
    with transaction(dsn, *statements) as open_:
        open_.execute(f"PREPARE TRANSACTION '{name}'".encode())


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_prepared_transactions(make_server: ServerMaker, databases: Databases, tmp_path: Path, mode: Mode) -> None:
    """They end by commit or rollback, before the snapshot, across its chunks and after it; they count at their end."""
    server = make_server(settings={**SESSION_SETTINGS, "max_prepared_transactions": "20"})
    pipeline = PipelineUnderTest(
        tmp_path,
        Databases(server.dsn(), databases.target),
        ["public.t"],
        sink={"mode": mode},
        snapshot={"chunk_rows": 11},
    )
    dsn = server.dsn()

    def begin(when: str) -> None:
        # Two transactions that touch both chunks; each moment has its own rows.
        for outcome in ("commit", "rollback"):
            number = len(touched)
            touched.append(f"{when} {outcome}")
            low, high = (n + number % 10 for n in (1, 11))
            prepare(
                dsn,
                f"{when} {outcome}",
                f"UPDATE t SET v = '{when} {outcome}' WHERE id IN ({low}, {high})",
                f"INSERT INTO t VALUES ({100 + number}, '{when}'), ({-number - 1}, '{when}')",
            )

    def end(when: str) -> None:
        execute(dsn, f"COMMIT PREPARED '{when} commit'", f"ROLLBACK PREPARED '{when} rollback'")

    touched: list[str] = []
    pipeline.source(*TABLE)
    begin("before")
    with connected(dsn, writes=True) as source, pytest.raises(Blocked, match="prepared transaction 'before commit'"):
        slot.create_slot(source, "early", timeout=0.5)
    end("before")
    pipeline.provision()
    assert len(pipeline.record.chunks) == 2
    begin("across")
    begin("after")
    pipeline.copy(0)
    end("across")
    begin("between")
    pipeline.copy(1)
    end("between")
    pipeline.apply()
    pipeline.assert_verified()
    # A batch that only prepares has no changes.
    begin("late")
    pipeline.apply()
    pipeline.assert_verified()
    end("after")
    end("late")
    pipeline.apply()
    pipeline.assert_verified()
    values = {v for (v,) in pipeline.target_rows("SELECT v FROM t")}
    assert {"before commit", "across commit", "between commit", "after commit", "late commit"} <= values
    assert not any(value.endswith("rollback") for value in values)
    assert query_rows(dsn, "SELECT count(*) FROM pg_prepared_xacts") == [(0,)]


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_hundred_thousand_tiny_transactions(
    databases: Databases, tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in one batch, on rows of which some are changed repeatedly."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode})
    pipeline.source("CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL)")
    pipeline.provision()
    pipeline.copy()
    pipeline.source(
        "CREATE PROCEDURE work(start int) LANGUAGE plpgsql AS $$ BEGIN"
        " SET synchronous_commit = off;"
        " FOR i IN start .. start + 49999 LOOP"
        "   IF i % 10 = 0 THEN INSERT INTO t VALUES (i, 0);"
        "   ELSE UPDATE t SET n = n + 1 WHERE id = i - i % 10; END IF;"
        "   COMMIT;"
        " END LOOP; END $$"
    )
    workers = [
        threading.Thread(target=execute, args=(databases.source, f"CALL work({start})")) for start in (0, 50_000)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert max(batches_up_to(pipeline, pipeline.marker(), monkeypatch)) == 100_000
    pipeline.assert_verified()
    if mode == "mirror":
        assert pipeline.target_rows("SELECT count(*), min(n), max(n) FROM t") == [(10_000, 9, 9)]
    else:
        found = (
            "SELECT count(*), count(DISTINCT (_commit_lsn, _seq)), count(DISTINCT _xid), min(_seq), max(_seq) FROM t"
        )
        assert pipeline.target_rows(found) == [(100_000, 100_000, 100_000, 1, 1)]
        # Each row's counter increases in the order of the changes.
        places = "SELECT n, row_number() OVER (PARTITION BY id ORDER BY _commit_lsn) AS place FROM t"
        order = f"SELECT bool_and(n = place - 1) FROM ({places}) o"
        assert pipeline.target_rows(order) == [(True,)]


def batches_up_to(pipeline: PipelineUnderTest, marker: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Apply the log up to a marker, which exists when the first batch is cut; return the changes of each batch."""
    found: list[int] = []
    choose, pass_batch = SlotStreamReader.latestOffset, StreamJob._write_batch

    def whole(reader: SlotStreamReader, *arguments: Any) -> Any:
        reader._connected().reach(marker)
        return choose(reader, *arguments)

    def counted(job: StreamJob, *arguments: Any) -> None:
        before = job._sinks.changes
        pass_batch(job, *arguments)
        found.append(job._sinks.changes - before)

    with monkeypatch.context() as patch:
        patch.setattr(SlotStreamReader, "latestOffset", whole)
        patch.setattr(StreamJob, "_write_batch", counted)
        apply_stream(pipeline.pipeline, marker)
    return found


def nothing(dsn: str) -> None:
    """Undo work in every way: by hand, by an error, by a session that ends, to a savepoint."""
    change = (
        "INSERT INTO t SELECT n, 'lost' FROM generate_series(1000, 6000) n",
        "UPDATE t SET v = 'lost'",
        "TRUNCATE t",
    )
    for _ in range(3):
        with transaction(dsn, *change) as open_:
            open_.rollback()
        with transaction(dsn, *change) as open_, pytest.raises(psycopg.Error):
            open_.execute("SELECT 1 / 0")
        with transaction(dsn, "SAVEPOINT s", *change) as open_:
            open_.execute("ROLLBACK TO s")
            open_.commit()
    with transaction(dsn, *change) as open_:
        query_rows(dsn, f"SELECT pg_terminate_backend({open_.info.backend_pid})")


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_batch_of_work_that_was_taken_back(databases: Databases, tmp_path: Path, mode: Mode) -> None:
    """It yields no changes, but the position passes it."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode}, snapshot={"chunk_rows": 10})
    pipeline.source(*TABLE)
    pipeline.provision()
    nothing(databases.source)
    pipeline.copy(0)
    nothing(databases.source)
    pipeline.copy(1)
    nothing(databases.source)
    pipeline.apply()
    pipeline.assert_verified()
    applied, counted = pipeline.record.applied, pipeline.target_rows("SELECT count(*) FROM t")
    nothing(databases.source)
    pipeline.apply()
    pipeline.assert_verified()
    assert pipeline.record.applied > applied
    assert pipeline.confirmed() >= pipeline.record.applied
    assert pipeline.target_rows("SELECT count(*) FROM t") == counted == [(20,)]
