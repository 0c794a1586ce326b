"""Events on a table while it is read, and between two reads of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import MissingPrivilege, StagingLost
from airflow_cdc_provider.engine.sinks.transactional import units
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_task import copy_chunk
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import SnapshotReader
from tests.protocol.races.scene import Make, Mode, await_waiting
from tests.support.databases import transaction
from tests.support.engine_parts import chunk_task, copy_chunk_of
from tests.support.patience import SECONDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["ascending", "descending"])
def test_a_truncate_between_two_chunks(make_pipeline: Make, mode: Mode, order: tuple[int, int]) -> None:
    """The rows of one chunk are gone, those of the other are not. No filter by keys shows it: the table is re-read."""
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    pipeline.copy(order[0])
    pipeline.source(
        "TRUNCATE public.t",
        "INSERT INTO public.t VALUES (1, 'new', NULL), (11, 'new', NULL), (30, 'new', NULL)",
    )
    pipeline.copy(order[1])
    pipeline.source("UPDATE public.t SET body = 'newer' WHERE id = 11")
    pipeline.apply()
    pipeline.assert_verified()
    # After the re-read, the table continues as before; then a truncate follows that no chunk contains.
    pipeline.source("INSERT INTO public.t VALUES (40, 'after', NULL)")
    pipeline.apply()
    pipeline.assert_verified()
    pipeline.source("TRUNCATE public.t", "INSERT INTO public.t VALUES (1, 'last', NULL)")
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()


@pytest.mark.parametrize("where", [None, "id > 5"])
def test_reading_again_and_again_at_one_place_in_the_log(make_pipeline: Make, where: str | None) -> None:
    """In a changelog the last read must win, although the stream has not moved in between."""
    pipeline = make_pipeline(mode="changelog")
    pipeline.provision()
    pipeline.copy()
    for key in (7, 17):
        pipeline.source(f"DELETE FROM public.t WHERE id = {key}", "UPDATE public.t SET body = body || '+'")
        assert commands.resnapshot(pipeline.pipeline, tables=["public.t"], where=where)["requested"] is None
    pipeline.apply()
    pipeline.assert_verified()


@pytest.mark.parametrize("change", ["UPDATE public.t SET body = 'T5' WHERE id = 1", "TRUNCATE public.t"])
def test_a_unit_that_was_staged_before_a_re_read(
    make_pipeline: Make, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """T5 is staged; a re-read under the same epoch sees T5 and T6. Without a check, T5 would undo T6, which the filter
    drops from then on.

    The reader is a part of the run that was halted just before its read.
    """
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy()
    pipeline.source(change)
    struck = []

    def read_again(name: str) -> None:
        if name == "before-batch-commit" and not struck:
            struck.append(name)
            pipeline.source("INSERT INTO public.t VALUES (1, 'T6', NULL) ON CONFLICT (id) DO UPDATE SET body = 'T6'")
            task = chunk_task(pipeline.pipeline, Chunk("public.t", 0, None, None))
            reader = SnapshotReader(task.read)
            task.sink.replace(task.epoch, task.target, None, reader, task.target)
            reader.close()

    monkeypatch.setattr(units, "failpoint", read_again)
    with pytest.raises(StagingLost, match="read again"):
        pipeline.apply()
    pipeline.apply()
    pipeline.assert_equal()


def test_a_rewrite_has_to_wait_for_a_chunk(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    pipeline.provision()
    rewrite = "ALTER TABLE public.t ALTER body TYPE varchar(100) USING body || '!'"
    reader = SnapshotReader(chunk_task(pipeline.pipeline, pipeline.chunk(0).chunk).read)
    try:
        batches = reader.batches()
        read = next(batches).num_rows
        with (
            psycopg.connect(pipeline.databases.source, options="-c lock_timeout=200ms", autocommit=True) as other,
            pytest.raises(psycopg.errors.LockNotAvailable),
        ):
            other.execute(rewrite)
        read += sum(batch.num_rows for batch in batches)
        assert read == 10
        # When it has been read completely, it holds nothing any more, even before its marker.
        pipeline.source(rewrite)
    finally:
        reader.close()


def test_a_chunk_has_to_wait_for_a_rewrite(make_pipeline: Make) -> None:
    """A snapshot from before the rewrite's commit would find the table empty."""
    pipeline = make_pipeline()
    pipeline.provision()
    chunk = pipeline.chunk(1).chunk
    dsn = pipeline.databases.source
    with (
        ThreadPoolExecutor(1) as pool,
        transaction(dsn, "ALTER TABLE public.t ALTER body TYPE text USING body || '!'") as rewrite,
    ):
        copied = pool.submit(copy_chunk_of, pipeline.pipeline, chunk)
        await_waiting(dsn, "wait_event_type = 'Lock' AND query LIKE 'LOCK TABLE%'")
        rewrite.commit()
        assert copied.result(SECONDS) == 10
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 11") == [("row 11!",)]


def test_rows_that_are_hidden_from_the_reader(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    role = f"reader_{pipeline.name}"
    pipeline.source(
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT CREATE ON DATABASE {pipeline.name} TO {role}",
        f"ALTER TABLE public.t OWNER TO {role}",
    )
    try:
        pipeline.change(source={"dsn": pipeline.databases.source.replace("postgres@", f"{role}@")})
        pipeline.provision()
        pipeline.copy(0)
        pipeline.source(
            "ALTER TABLE public.t ENABLE ROW LEVEL SECURITY",
            "ALTER TABLE public.t FORCE ROW LEVEL SECURITY",
            "CREATE POLICY even ON public.t USING (id % 2 = 0)",
        )
        failed = copy_chunk_of(pipeline.pipeline, pipeline.chunk(1).chunk)
        assert isinstance(failed, MissingPrivilege)
        assert "row-level security" in failed.message
        assert pipeline.chunk(1).watermark is None
        pipeline.source("ALTER TABLE public.t DISABLE ROW LEVEL SECURITY")
        pipeline.copy(1)
        pipeline.apply()
        pipeline.assert_equal()
    finally:
        commands.drop(pipeline.pipeline, takeover=True)
        pipeline.source("ALTER TABLE public.t OWNER TO postgres", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_chunk_is_committed_once(make_pipeline: Make) -> None:
    """A second attempt at the same time writes nothing: the record keeps the snapshot of the existing rows."""
    pipeline = make_pipeline()
    pipeline.provision()
    task = chunk_task(pipeline.pipeline, pipeline.chunk(0).chunk)
    assert copy_chunk(task) == 10
    first = pipeline.chunk(0)
    pipeline.source("UPDATE public.t SET body = 'between' WHERE id = 2")
    assert copy_chunk(task) == 0
    assert pipeline.chunk(0) == first
    pipeline.copy(1)
    pipeline.apply()
    pipeline.assert_equal()
