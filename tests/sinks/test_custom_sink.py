"""A sink of another package: the example of ``docs/sinks/custom.md``, installed like users do.

It goes through the same tests as every sink: copied and streamed while writers are active, killed around its commits,
overtaken while halted, damaged on purpose.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import (
    Blocked,
    ConfigError,
    ConnectionFailed,
    ForeignTable,
    StreamFailed,
    TargetConflict,
)
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.registry import sink_plugin, types
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sinks.staged import Staged
from tests.conftest import Databases
from tests.sinks.begun_sink import NEW, TARGET, WHOLE, Begun, SinkUnderTest, batch, begin
from tests.sinks.contract import ProtocolContract
from tests.sinks.contract_rows import MirrorContract
from tests.support.audited import AUDITED, LONG_PAUSE, await_transactions, writing
from tests.support.databases import query_rows
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, FAILED, SparklessRun

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "sqlite_sink"
KEYLESS = (
    "CREATE TABLE public.plain (a int, b text)",
    "ALTER TABLE public.plain REPLICA IDENTITY FULL",
    "INSERT INTO public.plain VALUES (1, NULL), (1, NULL), (2, 'two')",
)
DAMAGE = 'UPDATE "public.t" SET body = \'damaged\' WHERE id = (SELECT min(id) FROM "public.t")'
# Around the commits of the sink: the plan, the epoch, a chunk, a unit.
PLACES = (
    "before-plan",
    "after-plan",
    "after-epoch",
    "after-chunk-staged",
    "before-chunk-commit",
    "after-chunk-commit",
    "before-batch-staged",
    "after-batch-staged",
    "in-batch-commit",
    "after-batch-commit",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example with pip, without a network, and return the folder."""
    folder = tmp_path_factory.mktemp("sqlite_sink")
    shutil.copytree(EXAMPLE, folder / "source")  # keep the files of the build out of our folder
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", folder / "source"]
    subprocess.run(command, check=True)
    return folder / "site"


@pytest.fixture
def example(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the example on the path of this process, of runs without Spark, which inherit it, and of commands."""
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", str(installed))


class SqliteUnderTest(PipelineUnderTest):
    """A pipeline into a database file."""

    @property
    def database(self) -> Path:
        return self.directory / "warehouse.db"

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Execute a statement in the target, and commit it."""
        connection = sqlite3.connect(self.database)
        try:
            with connection:
                return connection.execute(statement).fetchall()
        finally:
            connection.close()

    def texts(self, table: str, columns: str) -> list[tuple[object, ...]]:
        """Return the rows of a target table."""
        return sorted(self.execute(f'SELECT {columns} FROM "{table}"'), key=str)

    def source_texts(self, table: str, columns: str) -> list[tuple[object, ...]]:
        """Return the rows of a source table, as Postgres writes them."""
        texts = ", ".join(f"{name}::text" for name in columns.split(", "))
        return sorted(query_rows(self.databases.source, f"SELECT {texts} FROM {table}"), key=str)

    def assert_mirrored(self, table: str, columns: str) -> None:
        """Check that the target holds the source's rows, text by text."""
        assert self.texts(table, columns) == self.source_texts(table, columns)

    @property
    def sink(self) -> Sink:
        return sink_of(self.pipeline)


@pytest.fixture
def pipeline(example: None, databases: Databases, tmp_path: Path) -> Iterator[SqliteUnderTest]:
    """Yield a pipeline of ``public.t`` and a table without a key; in the end no run of it is left."""
    made = SqliteUnderTest(
        tmp_path,
        databases,
        ["public.t", "public.plain"],
        snapshot={"chunk_rows": 800},
        stream={"max_batch_bytes": "256KiB"},
    )
    made.document["sink"] = {"type": "sqlite", "path": str(made.database)}
    made.change()
    yield made
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture
def small(pipeline: SqliteUnderTest) -> SqliteUnderTest:
    """Return a small table, copied and streamed."""
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, body text, big text)", *KEYLESS)
    pipeline.source("INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 20) n")
    pipeline.provision()
    pipeline.copy_tables()
    pipeline.apply()
    return pipeline


# -- discovery ---------------------------------------------------------------------------------------


def parsed(**sink: str) -> Pipeline:
    """Return the pipeline of a file with such a section ``sink``."""
    source = {"dsn": "postgresql://db/shop", "tables": ["public.t"]}
    return Pipeline.parse({"pipeline": "shop", "source": source, "sink": sink, "state": "file:///s"}, {})


def test_a_type_is_known_where_its_package_is_installed(example: None) -> None:
    assert "sqlite" in types("sink")
    settings = parsed(type="sqlite", path="/data/warehouse.db").sink
    assert type(settings) is sink_plugin("sqlite").settings
    assert (settings.place, settings.mode, settings.schema) == ("/data/warehouse.db", "mirror", "{schema}")


def test_a_type_that_nobody_brings_is_refused_with_those_there_are(example: None) -> None:
    with pytest.raises(ConfigError, match=r"sink.type: 'sqlight'") as refused:
        parsed(type="sqlight")
    assert {"postgres", "sqlite"} <= set(re.findall(r"\w+", refused.value.solution))


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "broken-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[airflow_cdc_provider.sinks]\nbroken = cdc_broken.plugin:Broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'broken' is registered as cdc_broken.plugin:Broken"):
        parsed(type="broken")


def test_a_package_that_registers_its_settings_as_before_is_told_what_to_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "old-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: old\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[airflow_cdc_provider.sinks]\nold = cdc_old:OldSettings\n")
    (tmp_path / "cdc_old.py").write_text("class OldSettings:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"'old' is registered as cdc_old:OldSettings, which is not a plugin"
    ) as refused:
        parsed(type="old")
    assert "registers a plugin" in refused.value.solution


def test_a_mode_that_the_sink_lacks_is_refused(example: None) -> None:
    with pytest.raises(ConfigError, match=r"sink\.mode: ") as refused:
        parsed(type="sqlite", path="/data/warehouse.db", mode="changelog")
    assert "mirror" in refused.value.solution


def test_names_that_are_one_to_sqlite_are_refused(pipeline: SqliteUnderTest) -> None:
    pipeline.source('CREATE TABLE public.t (id int PRIMARY KEY, body text, "Body" text)', *KEYLESS)
    with pytest.raises(ConfigError, match="differ in case only"):
        pipeline.provision()
    assert not pipeline.database.exists()


# -- from end to end ---------------------------------------------------------------------------------


def test_copied_and_streamed_beside_writers(pipeline: SqliteUnderTest) -> None:
    pipeline.source(AUDITED, *KEYLESS)
    with writing(pipeline.databases.source, LONG_PAUSE) as writers:
        first = SparklessRun(pipeline.file)
        assert (first.wait(), first.message) == (DONE, "")
        pipeline.source(
            "DELETE FROM public.plain WHERE ctid = (SELECT min(ctid) FROM public.plain WHERE b IS NULL)",
            "INSERT INTO public.plain VALUES (2, 'two'), (3, 'three')",
            "UPDATE public.plain SET b = 'deux' WHERE a = 2",
        )
        second = SparklessRun(pipeline.file, reread=("public.t",))
        assert (second.wait(), second.message) == (DONE, "")
        await_transactions(writers, 20)  # the runs may be over before much is written
    pipeline.apply()
    pipeline.assert_mirrored("public.t", "id, body, big")
    pipeline.assert_mirrored("public.plain", "a, b")
    pipeline.source("TRUNCATE public.plain", "INSERT INTO public.plain VALUES (4, 'four')")
    pipeline.apply()
    pipeline.assert_mirrored("public.plain", "a, b")
    pipeline.assert_verified()
    pipeline.execute(DAMAGE)
    result = pipeline.json("verify", code=4)
    assert [(table["table"], table["equal"]) for table in result["tables"]] == [
        ("public.plain", True),
        ("public.t", False),
    ]
    commands.drop(pipeline.pipeline)
    assert pipeline.sink.record() is None
    assert pipeline.texts("public.plain", "a, b") == [("4", "four")]


def test_killed_again_and_again_around_its_commits(pipeline: SqliteUnderTest) -> None:
    pipeline.source(AUDITED, *KEYLESS)
    with writing(pipeline.databases.source):
        for place in PLACES:
            broken = SparklessRun(pipeline.file, f"{place}:kill")
            assert (broken.wait(), broken.message) == (-9, ""), place
        again = SparklessRun(pipeline.file)
        assert (again.wait(), again.message) == (DONE, "")
    pipeline.apply()
    pipeline.assert_mirrored("public.t", "id, body, big")
    pipeline.assert_verified()
    assert pipeline.execute("SELECT name FROM sqlite_master WHERE name LIKE 'airflow_cdc_stage%'") == []


def test_overtaken_while_it_stands_still(pipeline: SqliteUnderTest) -> None:
    pipeline.source(AUDITED, *KEYLESS)
    with writing(pipeline.databases.source):
        for place in ("after-chunk-staged", "before-batch-commit"):
            paused = SparklessRun(pipeline.file, f"{place}:pause")
            try:
                paused.await_pause()
                overtaking = SparklessRun(pipeline.file, takeover=True)
                assert (overtaking.wait(), overtaking.message) == (DONE, ""), place
            finally:
                paused.resume()
            assert paused.wait() == FAILED
            assert "Fenced" in paused.message
    pipeline.apply()
    pipeline.assert_mirrored("public.t", "id, body, big")
    pipeline.assert_verified()


def test_a_writer_that_stands_still_in_its_transaction_is_told_of(
    pipeline: SqliteUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite cannot end it, so a takeover fails, but does no harm."""
    pipeline.source(AUDITED, *KEYLESS)
    paused = SparklessRun(pipeline.file, "in-batch-commit:pause")
    paused.await_pause()
    monkeypatch.setattr("cdc_sqlite.store.WAIT_SECONDS", 0.2)
    with pytest.raises(Blocked, match=r"another process has been writing to .*warehouse.db"):
        pipeline.sink.take_epoch("another")
    paused.process.kill()
    paused.process.join()
    assert SparklessRun(pipeline.file).wait() == DONE
    pipeline.assert_mirrored("public.t", "id, body, big")


# -- changes of definition ---------------------------------------------------------------------------


def test_columns_that_come_and_go_are_followed(small: SqliteUnderTest) -> None:
    small.source(
        "ALTER TABLE public.t ADD COLUMN more int DEFAULT 7",
        "UPDATE public.t SET body = 'later' WHERE id = 3",
    )
    small.apply()
    small.assert_mirrored("public.t", "id, body, more")
    small.source("ALTER TABLE public.t DROP COLUMN body", "UPDATE public.t SET more = 8 WHERE id = 4")
    small.apply()
    small.assert_mirrored("public.t", "id, big, more")
    assert [chunk.rows for chunk in small.record.chunks if chunk.chunk.table == "public.t"] == [20]
    small.assert_verified()


def test_a_column_with_another_name_or_type_has_its_table_read_again(small: SqliteUnderTest) -> None:
    small.source(
        "ALTER TABLE public.t RENAME COLUMN body TO text",
        "ALTER TABLE public.t ALTER COLUMN id TYPE numeric(9, 1)",
        "UPDATE public.t SET big = 'later' WHERE id = 3",
    )
    small.apply()
    small.assert_mirrored("public.t", "id, text, big")
    small.assert_verified()


def test_everything_is_read_again(small: SqliteUnderTest) -> None:
    with pytest.raises(ConfigError, match="because all values there are text"):
        commands.resnapshot(small.pipeline, tables=["public.t"], where="id > 9")
    for damage in ('DELETE FROM "public.plain"', "DELETE FROM airflow_cdc_pipelines"):
        small.source("UPDATE public.t SET body = body || '+'", "ALTER TABLE public.t RENAME big TO larger")
        small.execute(damage)
        commands.start_over(small.pipeline)
        assert len(small.texts("public.plain", "a")) == (0 if "plain" in damage else 3)
        small.copy_tables()
        small.apply()
        small.assert_mirrored("public.t", "id, body, larger")
        small.assert_mirrored("public.plain", "a, b")
        small.source("ALTER TABLE public.t RENAME larger TO big")


# -- the contract ------------------------------------------------------------------------------------


class SqliteStore(SinkUnderTest):
    """A database file that does not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def execute(self, statement: str) -> list[dict[str, object]]:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            cursor = connection.execute(statement)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def sink(self, mode: Mode, pipeline: str = "p") -> Sink:
        assert mode == "mirror"
        plugin: Any = sink_plugin("sqlite")
        sink: Sink = plugin.open(plugin.settings(str(self.path)), pipeline)
        return sink

    def read(self, target: Target) -> Sequence[Mapping[str, Any]]:
        return self.execute(f'SELECT * FROM "{target.schema}.{target.name}"')

    def names(self) -> set[str]:
        return {str(row["name"]) for row in self.execute("SELECT name FROM sqlite_master")}

    def staged(self) -> int:
        return sum(name.startswith("airflow_cdc_stage") for name in self.names())

    def damage(self, staged: Staged) -> None:
        self.execute(f'DELETE FROM "{staged.relation}"')

    def occupy(self, target: Target) -> None:
        self.execute(f'CREATE TABLE "{target.schema}.{target.name}" (id TEXT)')
        self.execute(f"INSERT INTO \"{target.schema}.{target.name}\" VALUES ('1')")

    def remove(self, target: Target) -> None:
        self.execute(f'DROP TABLE IF EXISTS "{target.schema}.{target.name}"')


@pytest.fixture
def store(example: None, tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "contract.db")


class TestProtocol(ProtocolContract):
    """The contract of the protocol on SQLite."""


class TestMirror(MirrorContract):
    """The contract of mirrors on SQLite."""


class TestOfItsOwn:
    """Guarantees of this sink alone."""

    @pytest.fixture
    def begun(self, store: SqliteStore) -> Begun:
        return begin(store, "mirror")

    def test_a_chunk_is_refused_that_a_unit_has_passed(self, begun: Begun) -> None:
        """Nothing is locked while the chunk is read."""

        def batches() -> Iterator[pa.RecordBatch]:
            yield batch(NEW)
            begun.unit(100, 200, begun.put("1", "a", "1.00"))

        with pytest.raises(StreamFailed, match="a unit was applied while"):
            begun.copy(WHOLE, batches=batches())
        assert begun.rows() == [("1", "a", "1.00")]
        assert begun.record.unfinished == (WHOLE,)

    def test_a_table_whose_name_differs_in_case_only_is_refused(self, begun: Begun) -> None:
        begun.store.occupy(dataclasses.replace(TARGET, schema="other"))
        with pytest.raises(ForeignTable, match="has rows or a definition that is not this pipeline's"):
            begun.sink.add(begun.epoch, [dataclasses.replace(TARGET, schema="Other")], [])


def test_what_somebody_else_has_done_to_a_target_is_told(small: SqliteUnderTest) -> None:
    small.execute("DELETE FROM \"public.plain\" WHERE a = '2'")
    small.source("DELETE FROM public.plain WHERE a = 2")
    with pytest.raises(TargetConflict, match=r"lacks rows that public.plain has deleted"):
        small.apply()
    commands.resnapshot(small.pipeline, tables=["public.plain"])
    small.execute('CREATE UNIQUE INDEX "mine" ON "public.t" (body)')
    small.source("UPDATE public.t SET body = 'same' WHERE id < 3")
    with pytest.raises(TargetConflict, match="refuses a change of the source: UNIQUE"):
        small.apply()
    small.execute('DROP INDEX "mine"')
    small.apply()
    small.assert_verified()


def test_a_file_that_is_no_database_is_left_alone(pipeline: SqliteUnderTest) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)", *KEYLESS)
    pipeline.database.write_bytes(b"somebody's notes")
    with pytest.raises(ConnectionFailed, match="is not an SQLite database"):
        pipeline.provision()
    with pytest.raises(ConnectionFailed, match="cannot be opened or written"):
        pipeline.sink.record()
    assert pipeline.database.read_bytes() == b"somebody's notes"
