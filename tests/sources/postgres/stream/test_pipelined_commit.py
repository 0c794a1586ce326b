"""Units that are applied while the rest of them is still being staged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.core.errors import StagingLost
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.postgres.stream.pipelined_commit import PipelinedCommit
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

UNIT = [StagedPiece("0/64", "0/C8", index, 1, b"", (), frozenset(), 0) for index in range(4)]


class Tables:
    """The state of a sink that applies pieces one by one; all or none of them are there in the end."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.rows: list[int] = []
        self.applied = threading.Semaphore(0)
        self.committed = threading.Event()
        self.before_the_last: Callable[[], None] = lambda: None

    def commit(self, first: StagedPiece, unit: Iterator[StagedPiece]) -> None:
        assert first is UNIT[0]
        try:
            for piece in unit:
                if piece.index == self.fails_at:
                    raise StagingLost("its rows are gone", "Start again.")
                if piece is UNIT[-1]:
                    self.before_the_last()
                self.rows.append(piece.index)
                self.applied.release()
        except BaseException:
            self.rows.clear()
            raise
        self.committed.set()

    def await_rows(self, count: int) -> None:
        for _ in range(count):
            assert self.applied.acquire(timeout=60)


@pytest.fixture
def tables() -> Tables:
    return Tables()


def test_pieces_are_applied_in_order_as_they_come(tables: Tables) -> None:
    with PipelinedCommit(lambda _: True, tables.commit) as commit:
        for index in (2, 0):
            commit.on_staged(UNIT[index])
        tables.await_rows(1)
        commit.on_staged(UNIT[1])
        tables.await_rows(2)
        assert tables.rows == [0, 1, 2]
        commit.on_staged(UNIT[3])
        tables.await_rows(1)
        assert not tables.committed.wait(0.2), "before it is known that there are no more"
        assert commit.finish(UNIT)
        assert tables.committed.is_set()
    assert tables.rows == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("heard", "unit"),
    [
        ([], UNIT),
        (UNIT[1:], UNIT),
        (UNIT[:3], UNIT),
        (UNIT, UNIT[:3]),  # a failed task has reported another piece
        ([*UNIT[:3], "no piece"], UNIT),
        (["no piece", *UNIT], UNIT),
        # The task of the second piece was repeated: its first staging does not belong to the unit.
        (UNIT, [UNIT[0], replace(UNIT[1], changes=2), *UNIT[2:]]),
    ],
)
def test_a_unit_of_which_something_else_was_heard_is_committed_otherwise(
    tables: Tables, heard: list[object], unit: list[StagedPiece]
) -> None:
    with PipelinedCommit(lambda _: True, tables.commit) as commit:
        for message in heard:
            commit.on_staged(message)
        assert not commit.finish(unit)
        assert not tables.committed.is_set()
        assert tables.rows == []


def test_what_is_staged_twice_is_not_taken_for_what_was_applied(tables: Tables) -> None:
    again = replace(UNIT[0], changes=2)
    with PipelinedCommit(lambda _: True, tables.commit) as commit:
        commit.on_staged(UNIT[0])
        tables.await_rows(1)
        for piece in (again, *UNIT[1:]):
            commit.on_staged(piece)
        assert not commit.finish([again, *UNIT[1:]])
    assert tables.rows == []


def test_a_late_report_is_ignored(tables: Tables) -> None:
    """A failed task reports while the unit is being committed."""
    with PipelinedCommit(lambda _: True, tables.commit) as commit:

        def tell_late() -> None:
            assert await_condition(lambda: commit._size is not None, 60)
            commit.on_staged("no piece")

        tables.before_the_last = tell_late
        for piece in UNIT:
            commit.on_staged(piece)
        assert commit.finish(UNIT)
    assert tables.committed.is_set()
    assert tables.rows == [0, 1, 2, 3]


def test_a_piece_that_does_not_come_is_not_waited_for_long(tables: Tables) -> None:
    """Its task may wait for a session that waits for the transaction."""
    with PipelinedCommit(lambda _: True, tables.commit, patience=0.2) as commit:
        commit.on_staged(UNIT[0])
        tables.await_rows(1)
        assert await_condition(lambda: not tables.rows, 60)
        for piece in UNIT[1:]:
            commit.on_staged(piece)
        assert not commit.finish(UNIT)
    assert not tables.committed.is_set()


def test_a_piece_of_which_more_is_to_be_asked_calls_it_off(tables: Tables) -> None:
    with PipelinedCommit(lambda piece: piece.index < 2, tables.commit) as commit:
        commit.on_staged(UNIT[0])
        tables.await_rows(1)
        for piece in UNIT[1:]:
            commit.on_staged(piece)
        assert not commit.finish(UNIT)
    assert not tables.committed.is_set()
    assert tables.rows == []


def test_what_it_failed_with_is_told_where_it_would_have_been_committed() -> None:
    tables = Tables(fails_at=1)
    with PipelinedCommit(lambda _: True, tables.commit) as commit:
        for piece in UNIT:
            commit.on_staged(piece)
        with pytest.raises(StagingLost):
            commit.finish(UNIT)
        for piece in UNIT:  # staged again, as the error demands
            commit.on_staged(piece)
        assert not commit.finish(UNIT)
    assert not tables.committed.is_set()


def test_a_unit_that_is_left_is_taken_back(tables: Tables) -> None:
    with PipelinedCommit(lambda _: True, tables.commit) as commit:
        commit.on_staged(UNIT[0])
        tables.await_rows(1)
    assert tables.rows == []


# -- a pipeline ----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sink", [{}, {"mode": "changelog"}], ids=["mirror", "changelog"])
def test_a_stream_that_is_killed_with_half_a_unit_applied(
    databases: Databases, tmp_path: Path, sink: dict[str, str]
) -> None:
    """Its batch has several pieces of eight megabytes each."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink=sink)
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, body text)")
    pipeline.provision()
    pipeline.copy()
    for first in range(0, 24_000, 2_000):
        rows = f"SELECT n, repeat(md5(n::text), 32) FROM generate_series({first}, {first + 1_999}) n"
        pipeline.source(f"INSERT INTO public.t {rows}")
    pipeline.source("UPDATE public.t SET body = 'short' WHERE id % 3 = 0", "DELETE FROM public.t WHERE id % 3 = 1")
    stream = pipeline.start("stream", failpoint="after-piece-applied:kill:2")
    assert stream.wait().code == -9, stream.output()
    stream.kill()
    if sink:
        beyond = f"SELECT count(*) FROM public.t WHERE _commit_lsn > '{format_lsn(pipeline.record.applied)}'"
        assert pipeline.target_rows(beyond) == [(0,)]
    assert pipeline.json("stream", "--until", "caught-up")["changes"] > 8_000
    pipeline.assert_verified()
    if sink:
        assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(24_000 + 8_000 + 8_000,)]
    stages = "SELECT count(*) FROM pg_class WHERE relname LIKE 'stage\\_%'"
    assert pipeline.target_rows(stages) == [(0,)]
