"""Small copies and catch-ups are done by the process of the command; all others need Spark.

In these tests Spark cannot start, since there is no Java.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_cdc_provider.engine.core.errors import ExitCode
from tests.conftest import Databases
from tests.support.databases import transaction
from tests.support.pipelines import COMMAND, Outcome, PipelineUnderTest

BOUNDS = {"min_rows": 1000, "min_bytes": "1MiB"}


@pytest.fixture
def made(tmp_path: Path, databases: Databases) -> PipelineUnderTest:
    """Return a pipeline of a table with 300 rows in three chunks."""
    made = PipelineUnderTest(tmp_path, databases, ["public.t"], spark=BOUNDS, snapshot={"chunk_rows": 100})
    made.source(
        "CREATE TABLE t (id bigint PRIMARY KEY, value text)",
        "INSERT INTO t SELECT n, md5(n::text) FROM generate_series(1, 300) n",
        "ANALYZE t",
    )
    return made


def run(made: PipelineUnderTest, command: str, *options: str) -> Outcome:
    """Run a command without Java, and return its outcome."""
    program = [str(COMMAND), command, "--pipeline", str(made.file), *options]
    return made.start_program(command, program, None, {"JAVA_HOME": str(made.directory)}).wait()


def assert_done(outcome: Outcome) -> None:
    assert outcome.code == ExitCode.DONE, outcome.stderr


def assert_needs_spark(outcome: Outcome) -> None:
    assert outcome.code != ExitCode.DONE
    assert "Check that Java 17 or newer is installed" in outcome.stderr


def test_a_small_copy_and_a_small_catch_up(made: PipelineUnderTest) -> None:
    """The first run copies, later ones catch up, also with re-reads; a table that joins is copied, too."""
    assert_done(run(made, "run"))
    assert len(made.finished_chunks()) == 3
    made.assert_equal()

    made.source("UPDATE t SET value = 'x' WHERE id < 50", "DELETE FROM t WHERE id > 250")
    assert_done(run(made, "stream", "--until", "caught-up"))
    made.assert_equal()

    made.source("CREATE TABLE u (id bigint PRIMARY KEY)", "INSERT INTO u VALUES (1)", "ALTER TABLE t ADD COLUMN n int")
    made.source("UPDATE t SET n = 7 WHERE id = 3")
    made.change(source={"tables": ["public.t", "public.u"]})
    assert_done(run(made, "run"))
    made.assert_equal()
    made.assert_equal("public.u")
    assert made.confirmed() >= made.record.applied


def test_more_rows_than_the_bound_need_spark(made: PipelineUnderTest) -> None:
    """Before anything is provisioned, the tables of the file count; afterwards the chunks that are not copied."""
    made.source("INSERT INTO t SELECT n FROM generate_series(301, 1400) n", "ANALYZE t")
    assert_needs_spark(run(made, "run"))
    assert_done(run(made, "provision"))
    assert_needs_spark(run(made, "snapshot"))
    assert_done(run(made, "snapshot", "--chunks", '[["public.t", 0, 4]]'))
    assert_done(run(made, "snapshot", "--chunks", '[["public.t", 5, 14]]'))
    assert_done(run(made, "run"))
    made.assert_equal()


def test_a_long_log_or_no_end_needs_spark(made: PipelineUnderTest) -> None:
    """The log since the last commit counts, and a stream without an end, or with one to come, is Spark's."""
    assert_done(run(made, "run"))
    for until in ("forever", "lsn:FF/0"):
        assert_needs_spark(run(made, "stream", "--until", until))
    made.source(
        "UPDATE t SET value = (SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 300) WHERE id > 0)"
    )
    assert_needs_spark(run(made, "stream", "--until", "caught-up"))
    made.change(spark={"min_bytes": "64MiB"})
    assert_done(run(made, "stream", "--until", "caught-up"))
    made.assert_equal()


def test_a_locked_table_is_left_to_spark(made: PipelineUnderTest) -> None:
    """Its size cannot be asked for; a job may wait longer."""
    assert_done(run(made, "provision"))
    with transaction(made.databases.source, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE"):
        assert_needs_spark(run(made, "snapshot"))


@pytest.mark.parametrize("bound", ["min_rows", "min_bytes"])
def test_a_bound_of_zero_always_starts_spark(made: PipelineUnderTest, bound: str) -> None:
    """So does a sink that only Spark can write."""
    made.change(spark={bound: 0})
    assert_needs_spark(run(made, "run"))
