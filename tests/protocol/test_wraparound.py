"""Transaction ids past 2^32: pgoutput sends their low 32 bits, snapshots have all 64.

``pg_resetwal`` moves a cluster to just below the wraparound. Then ids are used up while chunks are read, so that the
snapshots of one table lie on both sides of the wraparound, and transactions are open across it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Literal

import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, ServerMaker
from tests.protocol.repairs.scene import TABLE
from tests.support.databases import execute, transaction
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

WRAP = 1 << 32
XACT_SEGMENT_BYTES = 256 << 10
XACTS_A_SEGMENT = XACT_SEGMENT_BYTES * 4
ROWS = "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 20) n"


@pytest.fixture
def server(make_server: ServerMaker) -> PostgresServer:
    """Run a source whose next transaction id is three hundred below the wraparound."""
    server = make_server(settings={"autovacuum": "off"})
    # Rows of the catalogs from early transactions must not look as if they came from the future.
    execute(server.dsn(), "VACUUM FREEZE")
    server.stop()
    start = WRAP - 300
    # The status of transactions is read from files that only the assignment of their ids would have created.
    segment = server.data_directory / "pg_xact" / f"{start // XACTS_A_SEGMENT:04X}"
    segment.write_bytes(bytes(XACT_SEGMENT_BYTES))
    server.account.own(segment)
    reset = [server.binaries / "pg_resetwal", "-x", str(start), "-u", str(start - 100), "-e", "0"]
    subprocess.run(
        [*reset, "-D", server.data_directory],
        check=True,
        capture_output=True,
        cwd=server.directory,
        **server.account.popen_arguments(),
    )
    server.start()
    return server


@pytest.fixture(params=["mirror", "changelog"])
def pipeline(
    request: pytest.FixtureRequest, server: PostgresServer, databases: Databases, tmp_path: Path
) -> PipelineUnderTest:
    """Return a pipeline of twenty rows in four chunks, provisioned below the wraparound."""
    pair = Databases(server.dsn(), databases.target)
    under_test = PipelineUnderTest(
        tmp_path, pair, ["public.t"], pipeline="wrap", sink={"mode": request.param}, snapshot={"chunk_rows": 5}
    )
    under_test.source(TABLE, ROWS)
    under_test.provision()
    return under_test


def next_xid(pipeline: PipelineUnderTest) -> int:
    """Return the id of a transaction that has just ended."""
    return int(str(pipeline.source_rows("SELECT pg_current_xact_id()::text::bigint")[0][0]))


def burn(pipeline: PipelineUnderTest, until: int) -> None:
    """Use up transaction ids."""
    count = until - next_xid(pipeline) - 1
    assert count >= 0
    with psycopg.connect(pipeline.databases.source, autocommit=True) as connection:
        for _ in range(count):
            connection.execute("SELECT pg_current_xact_id()")


def update(name: str, *keys: int) -> str:
    """Return a statement that marks rows with a transaction's name."""
    return f"UPDATE public.t SET body = '{name}' WHERE id IN ({', '.join(map(str, keys))})"


def xmin_xmax(pipeline: PipelineUnderTest, index: int) -> tuple[int, int]:
    watermark = pipeline.chunk(index).watermark
    assert watermark is not None
    return watermark.snapshot.xmin, watermark.snapshot.xmax


def changes(pipeline: PipelineUnderTest) -> set[tuple[str, int]]:
    """Return the changes in a changelog."""
    return set(pipeline.target_rows("SELECT body, id FROM public.t WHERE _op = 'u'"))  # type: ignore[arg-type]


def assert_equal(pipeline: PipelineUnderTest, mode: Literal["mirror", "changelog"]) -> None:
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()


def test_a_wrap_inside_the_snapshot(pipeline: PipelineUnderTest) -> None:
    """Each transaction touches a row of every chunk, and is part of the chunks whose snapshots see it."""
    mode, dsn = pipeline.pipeline.sink.mode, pipeline.databases.source
    assert next_xid(pipeline) < WRAP
    burn(pipeline, WRAP - 20)
    pipeline.source(update("closed below", 3, 8, 13, 18))
    with transaction(dsn, update("open across", 1, 6, 11, 16)) as across:
        pipeline.copy(0)
        burn(pipeline, WRAP + 10)
        with transaction(dsn, update("open above", 2, 7, 12, 17)) as above:
            pipeline.copy(1)
            pipeline.source(update("closed above", 4, 9, 14, 19))
            across.commit()
            pipeline.copy(2)
            above.commit()
        pipeline.copy(3)
    assert xmin_xmax(pipeline, 0)[1] < WRAP
    assert xmin_xmax(pipeline, 1)[0] < WRAP < xmin_xmax(pipeline, 1)[1]
    assert xmin_xmax(pipeline, 2)[0] > WRAP
    pipeline.apply()
    assert_equal(pipeline, mode)
    if mode == "changelog":
        assert changes(pipeline) == {
            ("open across", 1),
            ("open across", 6),
            ("open above", 2),
            ("open above", 7),
            ("open above", 12),
            ("closed above", 4),
            ("closed above", 9),
        }
        sides = "SELECT DISTINCT body, _xid > 2147483648 FROM public.t WHERE _op = 'u' AND body LIKE 'open%'"
        assert dict(pipeline.target_rows(sides)) == {"open across": True, "open above": False}


def test_a_wrap_in_the_stream_and_everything_after_it(pipeline: PipelineUnderTest) -> None:
    """The stream passes the wraparound; re-reads and a second copy work above it as below it."""
    mode, dsn = pipeline.pipeline.sink.mode, pipeline.databases.source
    pipeline.copy()
    burn(pipeline, WRAP - 20)
    with transaction(dsn, update("open across", 1, 20)) as across:
        pipeline.source(update("below", 2, 19))
        burn(pipeline, WRAP + 10)
        pipeline.source(update("above", 3, 18))
        across.commit()
    # Re-read above the wraparound, while the stream has not reached any of this.
    commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="id < 10")
    pipeline.source(update("later", 3, 4))
    pipeline.apply()
    assert_equal(pipeline, mode)

    provisioning.start_over(pipeline.pipeline, takeover=False)
    with transaction(dsn, update("open again", 5)) as again:
        pipeline.copy()
        again.commit()
    pipeline.apply()
    assert_equal(pipeline, mode)
    assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE body = 'open again'") == [(1,)]
