"""Changes of types on which columns are based; neither the log nor the tables' catalog entries show them.

Existing values, also of keys, are then interpreted differently, and the recorded names and texts are unknown to the
source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import SchemaChanged, StreamFailed, ValueRefused
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog_watch import catalog_state
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import reread_changed
from tests.conftest import Databases, ServerMaker
from tests.support.engine_parts import copy_chunk_of
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A change of a type; ``{s}`` is the schema of the case.

    :param types: statements that create it.
    :param kind: type of the column.
    :param values: two of its values as SQL, of existing rows.
    :param ddl: statements that change it.
    :param again: whether the table has to be re-read.
    :param key: whether the column is the key.
    """

    types: str
    kind: str
    values: tuple[str, str]
    ddl: tuple[str, ...]
    again: bool = True
    key: bool = False


MOOD = "CREATE TYPE {s}.mood AS ENUM ('sad', 'ok')"
RANGE = f"{MOOD}; CREATE TYPE {{s}}.moodrange AS RANGE (subtype = {{s}}.mood)"
PAIR = "CREATE TYPE {s}.pair AS (a int, b int)"
LABELS = ("'sad'", "'ok'")
PAIRS = ("'(1,2)'", "'(,3)'")
RENAME = "ALTER TYPE {s}.mood RENAME VALUE 'ok' TO 'fine'"
WRITE = "UPDATE {s}.t SET n = n + 1 WHERE n = 2"
CASES = {
    "label": Case(MOOD, "{s}.mood", LABELS, (RENAME,)),
    "label_of_a_key": Case(MOOD, "{s}.mood", LABELS, (RENAME,), key=True),
    "label_taken_back": Case(
        MOOD, "{s}.mood", LABELS, (RENAME, WRITE, "ALTER TYPE {s}.mood RENAME VALUE 'fine' TO 'ok'"), key=True
    ),
    "arrays": Case(MOOD, "{s}.mood[]", ("'{{sad,ok}}'", "'{{}}'"), (RENAME,)),
    "domains": Case(f"{MOOD}; CREATE DOMAIN {{s}}.d AS {{s}}.mood", "{s}.d", LABELS, (RENAME,)),
    "ranges": Case(RANGE, "{s}.moodrange", ("'[sad,ok]'", "NULL"), (RENAME,)),
    "multiranges": Case(RANGE, "{s}.moodmultirange", ("'{{[sad,ok]}}'", "NULL"), (RENAME,)),
    "nested": Case(
        f"{MOOD}; CREATE TYPE {{s}}.pair AS (a int, b {{s}}.mood[])", "{s}.pair[]", ("'{{}}'", "NULL"), (RENAME,)
    ),
    "attribute": Case(PAIR, "{s}.pair", PAIRS, ("ALTER TYPE {s}.pair ADD ATTRIBUTE c int CASCADE",)),
    "attribute_gone": Case(PAIR, "{s}.pair", PAIRS, ("ALTER TYPE {s}.pair DROP ATTRIBUTE b CASCADE",)),
    "attribute_for_a_while": Case(
        PAIR,
        "{s}.pair",
        PAIRS,
        (
            "ALTER TYPE {s}.pair ADD ATTRIBUTE c int CASCADE",
            WRITE,
            "ALTER TYPE {s}.pair DROP ATTRIBUTE c CASCADE",
        ),
    ),
    "first_attribute": Case(
        "CREATE TYPE {s}.none AS ()", "{s}.none", ("'()'", "NULL"), ("ALTER TYPE {s}.none ADD ATTRIBUTE a int CASCADE",)
    ),
    "rows_of_a_table": Case("CREATE TABLE {s}.u (a int)", "{s}.u", ("'(1)'", "NULL"), ("ALTER TABLE {s}.u ADD b int",)),
    "added": Case(MOOD, "{s}.mood", LABELS, ("ALTER TYPE {s}.mood ADD VALUE 'fine' BEFORE 'ok'",), again=False),
    "renamed": Case(MOOD, "{s}.mood", LABELS, ("ALTER TYPE {s}.mood RENAME TO feeling",), again=False, key=True),
    "moved": Case(MOOD, "{s}.mood", LABELS, ("ALTER TYPE {s}.mood SET SCHEMA elsewhere",), again=False),
    "attribute_renamed": Case(
        PAIR, "{s}.pair", PAIRS, ("ALTER TYPE {s}.pair RENAME ATTRIBUTE a TO x CASCADE",), again=False
    ),
}


class Types(PipelineUnderTest):
    """A pipeline that streams one table per case."""

    def __init__(self, directory: Path, databases: Databases, cases: Mapping[str, Case], **sections: Any) -> None:
        self.cases = cases
        super().__init__(directory, databases, [f"{name}.t" for name in cases], **sections)
        self.source("CREATE SCHEMA elsewhere")
        for name, case in cases.items():
            primary = ("int", "{kind} PRIMARY KEY") if case.key else ("int PRIMARY KEY", "{kind}")
            table = f"CREATE TABLE {name}.t (id {primary[0]}, v {primary[1]}, n int)"
            rows = f"INSERT INTO {name}.t VALUES (1, {case.values[0]}, 1), (2, {case.values[1]}, 2)"
            statements = (case.types, table.replace("{kind}", case.kind), rows)
            self.source(f"CREATE SCHEMA {name}", *(statement.format(s=name) for statement in statements))
        self.provision()
        self.copy_tables()
        self.apply()

    def reads(self) -> dict[str, int]:
        """Return H of the last full read of each table."""
        return {c.chunk.table.removesuffix(".t"): c.watermark.high for c in self.record.chunks if c.watermark}

    def assert_same(self) -> None:
        """Check that each target has the texts of its source."""
        for name in self.cases:
            query = f"SELECT id, v::text, n FROM {name}.t ORDER BY id"
            assert self.target_rows(query) == self.source_rows(query), name


TYPICAL = {
    name: CASES[name]
    for name in ("label_of_a_key", "nested", "multiranges", "attribute_for_a_while", "first_attribute", "renamed")
}


@pytest.mark.parametrize("version", ["16", "18", "the system's"])
def test_what_types_are_made_of(
    databases: Databases, tmp_path: Path, make_server: ServerMaker, request: pytest.FixtureRequest, version: str
) -> None:
    cases = CASES if version == "16" else TYPICAL
    if version != "16":
        binaries = None if version == "18" else request.getfixturevalue("system_binaries")
        databases = Databases(make_server("18", binaries=binaries).dsn(), databases.target)
    pipeline = Types(tmp_path, databases, cases)
    read = pipeline.reads()
    for name, case in cases.items():
        pipeline.source(*(statement.format(s=name) for statement in (*case.ddl, WRITE)))
    pipeline.apply()
    pipeline.assert_same()
    again = {name for name, high in pipeline.reads().items() if high != read[name]}
    assert again == {name for name, case in cases.items() if case.again}


def test_a_stream_that_lives_sees_each_change(databases: Databases, tmp_path: Path) -> None:
    pipeline = Types(tmp_path, databases, CASES)
    targets, publication = pipeline.record.targets, pipeline.pipeline.source.publication
    with connected(databases.source) as source:
        seen = [catalog_state(source, publication, targets)]
        for name, case in CASES.items():
            pipeline.source(case.ddl[0].format(s=name))
            seen.append(catalog_state(source, publication, targets))
            assert seen[-1] != seen[-2], name
            pipeline.source(f"UPDATE {name}.t SET n = n + 1", f"VACUUM ANALYZE {name}.t")
        pipeline.source("VACUUM FULL pg_enum", "VACUUM FULL pg_type", "VACUUM FREEZE pg_attribute", "ANALYZE")
        assert catalog_state(source, publication, targets) == seen[-1]


def test_a_changelog_has_all_rows_anew(databases: Databases, tmp_path: Path) -> None:
    pipeline = Types(tmp_path, databases, {"label": CASES["label"]}, sink={"mode": "changelog"})
    pipeline.source(RENAME.format(s="label"))
    pipeline.apply()
    events = "SELECT _op::text, v::text FROM label.t ORDER BY _commit_lsn, _seq, id"
    assert pipeline.target_rows(events) == [("r", "sad"), ("r", "ok"), ("t", None), ("r", "sad"), ("r", "fine")]


def test_a_key_is_never_there_by_both_of_its_names(databases: Databases, tmp_path: Path) -> None:
    """Otherwise the row would occur twice, from the unit that changes it until the table is re-read."""
    pipeline = Types(tmp_path, databases, {"label_of_a_key": CASES["label_of_a_key"]})
    pipeline.target("CREATE UNIQUE INDEX ON label_of_a_key.t (id)")
    pipeline.source(RENAME.format(s="label_of_a_key"), WRITE.format(s="label_of_a_key"))
    pipeline.apply()
    pipeline.assert_same()


ENUM_ON_BOTH_SIDES = {name: CASES[name] for name in ("label", "label_of_a_key")}
COMPOSITE_ON_BOTH_SIDES = {name: CASES[name] for name in ("attribute", "attribute_gone")}
REMEDIES = {
    "ADD VALUE": (ENUM_ON_BOTH_SIDES, "ALTER TYPE {s}.mood ADD VALUE 'fine'"),
    "text": (ENUM_ON_BOTH_SIDES | COMPOSITE_ON_BOTH_SIDES, "ALTER TABLE {s}.t ALTER COLUMN v TYPE text"),
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_target_that_has_the_type_as_it_was(databases: Databases, tmp_path: Path, remedy: str) -> None:
    """It is refused, and the remedy of the error repairs it."""
    cases, statement = REMEDIES[remedy]
    pipeline = PipelineUnderTest(tmp_path, databases, [])
    for name, case in cases.items():
        pipeline.target(f"CREATE SCHEMA {name}", case.types.format(s=name))
    pipeline = Types(tmp_path, databases, cases)
    for name, case in cases.items():
        pipeline.source(*(s.format(s=name) for s in (*case.ddl, WRITE)))
        with pytest.raises(ValueRefused, match=rf"'v' of the target table {name}\.t") as refused:
            pipeline.apply()
        assert remedy in refused.value.solution
        pipeline.target(statement.format(s=name))
        pipeline.apply()
    pipeline.assert_same()


def test_a_record_that_does_not_say_what_types_are_made_of(databases: Databases, tmp_path: Path) -> None:
    """A record of an earlier version is accepted as it is, and completed."""
    pipeline = Types(tmp_path, databases, TYPICAL)
    read = pipeline.reads()
    recorded = "SELECT count(*) FROM airflow_cdc.tables, json_array_elements(definition::json -> 'columns') c"
    known = f"{recorded} WHERE c ->> 'parts' IS NOT NULL"
    pipeline.target(
        "UPDATE airflow_cdc.tables SET definition = regexp_replace(definition::text, ',? *\"parts\": (null|{[^}]*})',"
        " '', 'g')::json"
    )
    assert pipeline.target_rows(f"{recorded} WHERE c::text LIKE '%parts%'") == [(0,)]
    for name in TYPICAL:
        pipeline.source(WRITE.format(s=name))
    pipeline.apply()
    assert pipeline.reads() == read
    assert pipeline.target_rows(known) == [(len(TYPICAL),)]
    pipeline.assert_same()


# -- while chunks filter -----------------------------------------------------------------------------------

ENUM = "CREATE TYPE public.mood AS ENUM ('a', 'b', 'c', 'd', 'e', 'f', 'g')"
CITEXT = "CREATE SCHEMA lib; CREATE EXTENSION citext SCHEMA lib"
LATER = {
    "renamed": (ENUM, "public.mood", "ALTER TYPE public.mood RENAME TO feeling"),
    "moved": (ENUM, "public.mood", "CREATE SCHEMA elsewhere; ALTER TYPE public.mood SET SCHEMA elsewhere"),
    "label of a bound": (ENUM, "public.mood", "ALTER TYPE public.mood RENAME VALUE 'd' TO 'dd'"),
    "operators moved": (CITEXT, "lib.citext", "CREATE SCHEMA elsewhere; ALTER EXTENSION citext SET SCHEMA elsewhere"),
}


Begin = Callable[[str], PipelineUnderTest]


@pytest.fixture
def begin(databases: Databases, tmp_path: Path, make_server: ServerMaker, request: pytest.FixtureRequest) -> Begin:
    """Return the pipeline of a case, whose table has three chunks, of which the first is finished."""

    def make(case: str) -> PipelineUnderTest:
        types, kind, _ = LATER[case]
        source = databases.source
        if types == CITEXT:
            source = make_server(binaries=request.getfixturevalue("system_binaries")).dsn()
        pipeline = PipelineUnderTest(
            tmp_path,
            Databases(source, databases.target),
            ["public.t", "public.u"],
            snapshot={"chunk_rows": 3},
            stream={"max_batch_bytes": "64KiB"},
        )
        pipeline.source(
            types,
            f"CREATE TABLE public.t (id {kind} PRIMARY KEY, body text)",
            f"INSERT INTO public.t SELECT m::{kind}, m FROM unnest('{{a,b,c,d,e,f,g}}'::text[]) m",
            "CREATE TABLE public.u (id int PRIMARY KEY, body text)",
        )
        pipeline.provision()
        pipeline.copy_tables(0)
        return pipeline

    return make


def assert_same(pipeline: PipelineUnderTest) -> None:
    query = "SELECT id::text, body FROM public.t ORDER BY 1"
    assert pipeline.target_rows(query) == pipeline.source_rows(query)
    pipeline.assert_verified()


@pytest.mark.parametrize("case", LATER)
def test_before_a_chunk(begin: Begin, case: str) -> None:
    pipeline = begin(case)
    target = next(target for target in pipeline.record.targets if target.table.name == "t")
    pipeline.source(LATER[case][2], "UPDATE public.t SET body = 'x' WHERE id > 'b'")
    assert isinstance(copy_chunk_of(pipeline.pipeline, pipeline.chunk(1).chunk), SchemaChanged)
    with run_part(pipeline.pipeline, "snapshot-0", None) as (run, _):
        assert reread_changed(run, target) == 7
    pipeline.apply()
    assert_same(pipeline)


@pytest.mark.parametrize("case", LATER)
def test_before_the_stream(begin: Begin, case: str) -> None:
    pipeline = begin(case)
    pipeline.source("UPDATE public.t SET body = 'x' WHERE id = 'e'")
    pipeline.copy_tables(1, 2)
    pipeline.source(LATER[case][2], "UPDATE public.t SET body = 'y' WHERE id = 'f'")
    pipeline.apply()
    assert_same(pipeline)


def test_in_the_middle_of_a_large_transaction(begin: Begin) -> None:
    """The staged parts of it are staged again, because the table has been re-read meanwhile."""
    pipeline = begin("renamed")
    large = "INSERT INTO public.u SELECT n, repeat('x', 100) FROM generate_series(1, 3000) n"
    pipeline.source(f"BEGIN; {large}; UPDATE public.t SET body = 'x' WHERE id = 'e'; COMMIT")
    pipeline.copy_tables(1, 2)
    pipeline.source(LATER["renamed"][2])
    with pytest.raises(StreamFailed, match="streamed again"):
        pipeline.apply()
    pipeline.apply()
    assert_same(pipeline)


@pytest.mark.parametrize("case", ["renamed", "label of a bound"])
def test_before_rows_are_read_again(begin: Begin, case: str) -> None:
    """``resnapshot --where`` names keys as the target has them, so the stream has to follow first."""
    pipeline = begin(case)
    pipeline.copy_tables(1, 2)
    pipeline.apply()
    pipeline.source(LATER[case][2])
    with pytest.raises(SchemaChanged):
        commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="body = 'd'")
    pipeline.apply()
    commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="body = 'd'")
    pipeline.apply()
    assert_same(pipeline)
