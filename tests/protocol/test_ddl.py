"""DDL at the source while the pipeline runs: followed in order, read again, or stopped before, and then going on.

Every script is played while nothing reads, so that it arrives as one batch: what is followed has to be followed where
it stands between the changes. At the end the target is compared with the source value by value, or the state that it
must have stopped in, and then the repair that the error names is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from psycopg2 import sql

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow, Failpoint, SchemaChanged, StreamFailed
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import readopt
from tests.conftest import Databases, ServerMaker
from tests.support.changelogs import assert_same_values, fold
from tests.support.engine_parts import copy_chunk_of
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

Mode = Literal["mirror", "changelog"]

TABLE = "CREATE TABLE {t} (id int PRIMARY KEY, a int, v varchar(10), w text)"
ROWS = "INSERT INTO {t} SELECT n, n * 10, 'v' || n, 'w' || n FROM generate_series(1, 12) n"
# Valid under every definition: of the columns beside the key only one is named, which no DDL here touches.
DATA = (
    "UPDATE {t} SET w = w || '+' WHERE id % 3 = 0",
    "INSERT INTO {t} (id, w) SELECT coalesce(max(id), 0) + 1, 'new' FROM {t}",
    "DELETE FROM {t} WHERE id = (SELECT min(id) FROM {t})",
)

FOLLOWED = {
    "add": ["ALTER TABLE {t} ADD b int"],
    "default": ["ALTER TABLE {t} ADD b text DEFAULT 'it''s {{\"x\"}}, \\'"],
    "default_array": ["ALTER TABLE {t} ADD b int[] DEFAULT '{{{{1,2}},{{3,NULL}}}}'"],
    "default_box": [
        "ALTER TABLE {t} ADD b box DEFAULT '(1,1),(0,0)'",
        "ALTER TABLE {t} ADD c box[] DEFAULT '{{{{(1,1),(0,0);(3,3),(2,2)}}}}'",
    ],
    "default_stable": ["ALTER TABLE {t} ADD b timestamptz NOT NULL DEFAULT now()"],
    "default_changed": ["ALTER TABLE {t} ADD b int DEFAULT 7", "ALTER TABLE {t} ALTER b SET DEFAULT 8"],
    "two": ["ALTER TABLE {t} ADD b int DEFAULT 1, ADD c numeric(10,2) DEFAULT 2.5"],
    "odd": ['ALTER TABLE {t} ADD "Sel ect ""x"" %" int DEFAULT 1'],
    "drop": ["ALTER TABLE {t} DROP a"],
    "rename": ["ALTER TABLE {t} RENAME a TO amount"],
    "there_and_back": ["ALTER TABLE {t} RENAME id TO ident", "ALTER TABLE {t} RENAME ident TO id"],
    "widen": ["ALTER TABLE {t} ALTER v TYPE varchar(40)", "UPDATE {t} SET v = repeat('x', 40) WHERE id = 8"],
    "to_text": ["ALTER TABLE {t} ALTER v TYPE text"],
    "not_null": ["ALTER TABLE {t} ALTER w SET NOT NULL"],
    "set_default": ["ALTER TABLE {t} ALTER a SET DEFAULT 5"],
    "vacuumed": ["VACUUM FULL {t}"],
    "indexed": ["CREATE INDEX ON {t} (a)", "ALTER TABLE {t} SET (fillfactor = 50)"],
}
READ_AGAIN = {
    "bigger": ["ALTER TABLE {t} ALTER a TYPE bigint"],
    "expression": ["ALTER TABLE {t} ALTER a TYPE text USING 'a' || a"],
    "volatile": ["ALTER TABLE {t} ADD b double precision DEFAULT random()"],
    "drop_and_add": ["ALTER TABLE {t} DROP a", "ALTER TABLE {t} ADD b int DEFAULT 9"],
    "replaced": ["ALTER TABLE {t} DROP v", "ALTER TABLE {t} ADD v varchar(10) DEFAULT 'x'"],
    "rename_and_add": ["ALTER TABLE {t} RENAME a TO b", "ALTER TABLE {t} ADD a int DEFAULT 3"],
    "recomputed": ["ALTER TABLE {t} ALTER a TYPE int USING a + 1"],
    "key_type": ["ALTER TABLE {t} ALTER id TYPE bigint"],
    "add_vacuumed": ["ALTER TABLE {t} ADD b int DEFAULT 3", "VACUUM FULL {t}"],
    "add_truncated": ["ALTER TABLE {t} ADD b int DEFAULT 3", "TRUNCATE {t}"],
}
NAMED = "UPDATE {t} SET a = 'pg_class'::regclass::int WHERE id = 9"
# The same bits read otherwise, and by the source alone.
READ_AGAIN |= {
    "reg": [NAMED, "ALTER TABLE {t} ALTER a TYPE regclass"],
    "reg_and_back": [NAMED, "ALTER TABLE {t} ALTER a TYPE regclass", *DATA, "ALTER TABLE {t} ALTER a TYPE oid"],
}
# In a changelog the values of rows that are gone would have to be converted too.
MIRROR_ONLY = {
    "unlike": ["ALTER TABLE {t} ALTER a TYPE int[] USING ARRAY[a]"],
    "swap": [
        "BEGIN; ALTER TABLE {t} RENAME a TO x; ALTER TABLE {t} RENAME v TO a; ALTER TABLE {t} RENAME x TO v; COMMIT"
    ],
}


class Tables(PipelineUnderTest):
    """A pipeline that streams one table a case, captured by a rule."""

    def __init__(
        self,
        directory: Path,
        databases: Databases,
        cases: Sequence[str],
        mode: Mode,
        table: str = TABLE,
        rule: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> None:
        self.cases, self.mode, self.rule = cases, mode, rule or {}
        rules = [{"table": f"public.{case}", **self.rule} for case in cases]
        super().__init__(directory, databases, rules, sink={"mode": mode}, **sections)
        self.play(table, ROWS)
        self.provision()
        for case in cases:
            self.copy(table=f"public.{case}")
        self.apply()

    def play(self, *statements: str) -> None:
        """Execute statements for every table."""
        self.source(*(statement.format(t=f"public.{case}") for case in self.cases for statement in statements))

    def reads(self) -> dict[str, int]:
        """H of the last reading of each table as a whole."""
        return {
            c.chunk.table.removeprefix("public."): c.watermark.high
            for c in self.record.chunks
            if c.watermark is not None
        }

    def assert_same(self) -> None:
        """The targets are what the sources are, and the record says how they are defined."""
        self.assert_verified()
        self.assert_values()
        for target in self.record.targets:
            table = f"{target.table.schema}.{target.table.name}"
            defined = self.source_rows(
                f"SELECT attname::text, attnum FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0"
                " AND NOT attisdropped ORDER BY attnum"
            )
            defined = [column for column in defined if column[0] in self.rule.get("columns", dict(defined))]
            assert [(column.name, column.attnum) for column in target.table.columns] == defined, table
            if self.mode == "mirror":
                width = f"SELECT count(*) FROM information_schema.columns WHERE table_name = '{target.table.name}'"
                assert self.target_rows(width) == [(len(defined),)], table

    def assert_values(self) -> None:
        """The targets hold what the sources do, whatever other columns they have."""
        for target in self.record.targets:
            table, columns = f"{target.table.schema}.{target.table.name}", [c.name for c in target.table.columns]
            if self.mode == "changelog":
                assert_same_values(self, ["id"], columns, *table.split("."))
            else:
                names = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
                query = f"SELECT {names} FROM {table} WHERE {self.rule.get('where', 'true')} ORDER BY id"
                assert self.target_rows(query) == self.source_rows(query), table


@pytest.fixture
def tables(databases: Databases, tmp_path: Path) -> Callable[..., Tables]:
    """Makes pipelines of one table a case."""
    return lambda cases, mode="mirror", **sections: Tables(tmp_path, databases, list(cases), mode, **sections)


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_ddl_between_data_in_one_batch(tables: Callable[..., Tables], mode: Mode) -> None:
    cases = FOLLOWED | READ_AGAIN | (MIRROR_ONLY if mode == "mirror" else {})
    assert_followed(tables(cases, mode), cases)


TYPICAL = {
    name: (FOLLOWED | READ_AGAIN | MIRROR_ONLY)[name]
    for name in (
        "default",
        "default_array",
        "default_box",
        "drop",
        "rename",
        "widen",
        "vacuumed",
        "bigger",
        "volatile",
        "replaced",
        "swap",
    )
}


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["18", "the system's"])
def test_ddl_on_other_servers(
    databases: Databases, tmp_path: Path, make_server: ServerMaker, request: pytest.FixtureRequest, version: str
) -> None:
    """Older servers have other catalogs, and newer ones too."""
    binaries = None if version == "18" else request.getfixturevalue("system_binaries")
    source = make_server("18", binaries=binaries).dsn()
    tables = Tables(tmp_path, Databases(source, databases.target), list(TYPICAL), "mirror", pipeline="ddl")
    assert_followed(tables, TYPICAL)


KEYLESS = "CREATE TABLE {t} (id int, a int, v varchar(10), w text); ALTER TABLE {t} REPLICA IDENTITY FULL"
# Postgres lets nobody change what a publication's condition or list of columns is made of.
BESIDE = {name: (FOLLOWED | READ_AGAIN)[name] for name in ("default", "there_and_back", "not_null", "volatile")}
SHAPES: dict[str, tuple[str, dict[str, Any], Mapping[str, Sequence[str]], set[str]]] = {
    "no key": (KEYLESS, {}, TYPICAL | {"recomputed": READ_AGAIN["recomputed"]}, set()),
    "a condition": (TABLE, {"where": "id > 2"}, TYPICAL, set()),
    "columns and a condition": (TABLE, {"columns": ["id", "v", "w"], "where": "id > 2"}, BESIDE, {"volatile"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
def test_ddl_of_tables_that_are_captured_otherwise(databases: Databases, tmp_path: Path, shape: str) -> None:
    table, rule, cases, not_seen = SHAPES[shape]
    assert_followed(Tables(tmp_path, databases, list(cases), "mirror", table, rule), cases, not_seen)


def assert_followed(pipeline: Tables, cases: Mapping[str, Sequence[str]], not_seen: Collection[str] = ()) -> None:
    """Play data, DDL and data in one batch, and check that what can be followed is; ``not_seen`` is not captured."""
    read = pipeline.reads()
    pipeline.play(*DATA)
    for case, ddl in cases.items():
        pipeline.source(*(statement.format(t=f"public.{case}") for statement in ddl))
        pipeline.source(*(statement.format(t=f"public.{case}") for statement in DATA))
    pipeline.apply()
    pipeline.assert_same()
    again = {case for case, high in pipeline.reads().items() if high != read[case]}
    assert again == cases.keys() - FOLLOWED.keys() - set(not_seen)
    pipeline.play(*DATA)
    pipeline.apply()
    pipeline.assert_same()


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_ddl_that_no_data_follows(tables: Callable[..., Tables], mode: Mode) -> None:
    cases = FOLLOWED | READ_AGAIN | (MIRROR_ONLY if mode == "mirror" else {})
    pipeline = tables(cases, mode)
    read = pipeline.reads()
    pipeline.play(*DATA)
    for case, ddl in cases.items():
        pipeline.source(*(statement.format(t=f"public.{case}") for statement in ddl))
    pipeline.apply()
    pipeline.assert_same()
    again = {case for case, high in pipeline.reads().items() if high != read[case]}
    assert again == cases.keys() - FOLLOWED.keys()


SCRIPTS = {
    "several": [
        *DATA,
        "ALTER TABLE {t} ADD b int DEFAULT 1",
        *DATA,
        "ALTER TABLE {t} RENAME b TO c",
        *DATA,
        "ALTER TABLE {t} DROP a",
        *DATA,
    ],
    "there_and_back": [
        *DATA,
        "ALTER TABLE {t} ADD b int DEFAULT 1",
        *DATA,
        "UPDATE {t} SET b = id",
        "ALTER TABLE {t} DROP b",
        *DATA,
    ],
    "in_the_middle": [
        "BEGIN; " + "; ".join(DATA) + "; ALTER TABLE {t} ADD b int DEFAULT 1; " + "; ".join(DATA) + "; COMMIT",
        *DATA,
    ],
    "twice_in_one": [
        "BEGIN; "
        + "; ".join(DATA)
        + "; ALTER TABLE {t} ADD b int DEFAULT 1; "
        + "; ".join(DATA)
        + "; ALTER TABLE {t} DROP b, ADD c text DEFAULT 'c'; "
        + "; ".join(DATA)
        + "; COMMIT",
        *DATA,
    ],
    "at_the_start": ["BEGIN; ALTER TABLE {t} ADD b int DEFAULT 1; " + "; ".join(DATA) + "; COMMIT", *DATA],
    "rolled_back": ["BEGIN; ALTER TABLE {t} ADD b int DEFAULT 1; " + "; ".join(DATA) + "; ROLLBACK", *DATA],
    "rolled_back_to": [
        "BEGIN; SAVEPOINT s; ALTER TABLE {t} ADD b int; " + DATA[1] + "; ROLLBACK TO s; " + "; ".join(DATA) + "; COMMIT"
    ],
    "truncated": [*DATA, "TRUNCATE {t}", "ALTER TABLE {t} ADD b int DEFAULT 1", DATA[1], "TRUNCATE {t}", DATA[1]],
    "new_values": [
        "ALTER TABLE {t} ADD b int DEFAULT 1",
        "INSERT INTO {t} (id, b) VALUES (100, 2), (101, NULL)",
        "UPDATE {t} SET b = 3 WHERE id = 5",
        "UPDATE {t} SET id = 50 WHERE id = 6",
        "DELETE FROM {t} WHERE id = 7",
    ],
    "finer": [
        "ALTER TABLE {t} ADD n numeric(10,2) DEFAULT 1.25, ADD s timestamp(0) DEFAULT '2020-01-01'",
        *DATA,
        "ALTER TABLE {t} ALTER n TYPE numeric, ALTER s TYPE timestamp(3)",
        "UPDATE {t} SET n = 1.23456, s = '2020-01-01 00:00:00.123' WHERE id = 8",
    ],
    "key_renamed_for_good": [*DATA, "ALTER TABLE {t} RENAME id TO ident", "DELETE FROM {t} WHERE ident = 5"],
}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_scripts_of_data_and_ddl(tables: Callable[..., Tables], mode: Mode) -> None:
    """All in one batch, table by table; then each table's batch for itself."""
    scripts = {name: script for name, script in SCRIPTS.items() if name != "key_renamed_for_good"}
    pipeline = tables(scripts, mode)
    for case, script in scripts.items():
        pipeline.source(*(statement.format(t=f"public.{case}") for statement in script))
    pipeline.apply()
    pipeline.assert_same()
    pipeline.play(*DATA)
    pipeline.apply()
    pipeline.assert_same()


def test_a_renamed_key(tables: Callable[..., Tables]) -> None:
    pipeline = tables(["k"])
    pipeline.source(*(s.format(t="public.k") for s in SCRIPTS["key_renamed_for_good"]))
    pipeline.source("UPDATE public.k SET ident = 70 WHERE ident = 8")
    pipeline.apply()
    pipeline.assert_equal("public.k")
    pipeline.assert_verified()


# -- what stops ----------------------------------------------------------------------------------------


def resnapshot(pipeline: PipelineUnderTest) -> None:
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])


def drop_view(pipeline: PipelineUnderTest) -> None:
    pipeline.target("DROP VIEW public.seen")


def name_another(*tables: str) -> Callable[[PipelineUnderTest], None]:
    def repair(pipeline: PipelineUnderTest) -> None:
        pipeline.change(source={"tables": ["public.other", *tables]})
        pipeline.provision()
        for table in tables:
            pipeline.copy(table=table)

    return repair


@dataclass(frozen=True)
class Stop:
    """A change that stops the pipeline.

    :param ddl: at the source, between data.
    :param words: of the error.
    :param repair: what its solution names.
    :param written: the table that data is written to then, ``None`` for no data.
    :param after: the table that goes on, ``None`` if it is gone.
    :param first: what is done at the source before the stream is applied.
    :param target: what is done at the target.
    """

    ddl: tuple[str, ...]
    words: str
    repair: Callable[[PipelineUnderTest], None]
    written: str | None = "public.t"
    after: str | None = "public.t"
    first: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    mode: Mode = "mirror"


FILL = ("UPDATE public.t SET a = 0 WHERE a IS NULL", "ALTER TABLE public.t ALTER a SET DEFAULT 0")
KEY = "ALTER TABLE public.t DROP CONSTRAINT t_pkey, ALTER a SET NOT NULL, ADD PRIMARY KEY (id, a)"
RENAME = ("ALTER TABLE public.t RENAME TO u",)
VIEW = ("CREATE VIEW public.seen AS SELECT a FROM public.t",)
ANEW = ("DROP TABLE public.t", TABLE.format(t="public.t"), ROWS.format(t="public.t"))
STOPS = {
    "key": Stop((KEY,), "key of public.t was", resnapshot, first=FILL),
    "key, a changelog": Stop((KEY,), "key of public.t was", resnapshot, first=FILL, mode="changelog"),
    "identity": Stop(("ALTER TABLE public.t REPLICA IDENTITY FULL",), "replica identity", resnapshot),
    "no identity": Stop(
        ("ALTER TABLE public.t REPLICA IDENTITY NOTHING",),
        "NOTHING",
        lambda p: p.source("ALTER TABLE public.t REPLICA IDENTITY DEFAULT"),
        written=None,
    ),
    "renamed back": Stop(
        RENAME, "renamed public.u", lambda p: p.source("ALTER TABLE public.u RENAME TO t"), written="public.u"
    ),
    "renamed": Stop(RENAME, "renamed", name_another("public.u"), written="public.u", after="public.u"),
    "renamed without data": Stop(RENAME, "renamed", name_another("public.u"), written=None, after="public.u"),
    "dropped": Stop(("DROP TABLE public.t",), "dropped", name_another(), written=None, after=None),
    "dropped, a changelog": Stop(
        ("DROP TABLE public.t",), "dropped", name_another(), written=None, after=None, mode="changelog"
    ),
    "made anew": Stop(ANEW, "made anew", resnapshot),
    "unpublished": Stop(("ALTER PUBLICATION {} DROP TABLE public.t",), "no longer in publication", resnapshot),
    "unpublished, a changelog": Stop(
        ("ALTER PUBLICATION {} DROP TABLE public.t",), "no longer in publication", resnapshot, mode="changelog"
    ),
    "view": Stop(("ALTER TABLE public.t DROP a",), "other objects depend", drop_view, target=VIEW),
    "view, no data": Stop(("ALTER TABLE public.t ALTER a TYPE bigint",), "view", drop_view, target=VIEW, written=None),
    "history": Stop(
        ("ALTER TABLE public.t ALTER v TYPE int USING length(v)",),
        "invalid input syntax",
        lambda p: p.target("ALTER TABLE public.t RENAME v TO v_as_text"),
        mode="changelog",
    ),
    "name taken": Stop(
        ("ALTER TABLE public.t DROP v", "ALTER TABLE public.t RENAME w TO v"),
        "already exists",
        lambda p: p.target("ALTER TABLE public.t RENAME v TO v_of_before"),
        written=None,
        mode="changelog",
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_what_cannot_be_followed_stops_before_it(databases: Databases, tmp_path: Path, name: str) -> None:
    stop = STOPS[name]
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t", "public.other"], sink={"mode": stop.mode})
    pipeline.source(*(s.format(t=f"public.{t}") for t in ("t", "other") for s in (TABLE, ROWS)))
    pipeline.source(*stop.first)
    pipeline.provision()
    pipeline.copy()
    pipeline.copy(table="public.other")
    pipeline.apply()
    pipeline.target(*stop.target)

    def write(table: str | None) -> None:
        names = [name for name in (table, "public.other") if name is not None]
        pipeline.source(*(statement.format(t=name) for name in names for statement in DATA))

    write("public.t")
    rows = "SELECT id, a, v, w FROM public.t ORDER BY id"
    before = pipeline.source_rows(rows)
    publication = f'"{pipeline.pipeline.source.publication}"'
    pipeline.source(*(statement.format(publication) for statement in stop.ddl))
    if name != "name taken":
        write(stop.written)
    for _ in range(2):  # going on without the repair changes nothing
        with pytest.raises(CannotFollow, match=stop.words):
            pipeline.apply()
        if stop.mode == "mirror":
            assert pipeline.target_rows(rows) == before
        else:
            with connected(pipeline.databases.target) as target:
                folded = fold(target, sql.Identifier("public", "t"), ["id"], ["id", "a", "v", "w"])
            texts = [tuple(None if value is None else str(value) for value in row) for row in before]
            assert sorted(folded) == sorted(texts)
    stop.repair(pipeline)
    pipeline.apply()
    if name != "name taken":
        write(stop.after)
    pipeline.apply()
    pipeline.assert_verified()
    if stop.mode == "mirror":
        pipeline.assert_equal(stop.after or "public.other")
    assert {t.table.label for t in pipeline.record.targets} == {"public.other", *([stop.after] if stop.after else [])}


@dataclass(frozen=True)
class Remedy:
    """What stands in the way at the target, and what is done about it, each time that the stream stops."""

    ddl: str
    obstacle: str
    remedies: tuple[str, ...]
    modes: tuple[Mode, ...] = ("mirror", "changelog")


WIDEN = "ALTER TABLE {t} ALTER v TYPE varchar(40)"
SEEN = "CREATE VIEW {t}_seen AS SELECT id, a, v FROM {t}"
OWN = "ALTER TABLE {t} ADD b int"
REMEDIES = {
    "view": Remedy(WIDEN, SEEN, ("DROP VIEW {t}_seen",)),
    "column_of_a_view": Remedy(WIDEN, SEEN, ("ALTER TABLE {t} RENAME v TO v_old",)),
    "column_that_is_computed_with": Remedy(
        WIDEN,
        "ALTER TABLE {t} ADD g text GENERATED ALWAYS AS (v || '!') STORED",
        ("ALTER TABLE {t} RENAME v TO v_old",),
    ),
    "renamed_and_retyped": Remedy(
        "ALTER TABLE {t} RENAME v TO u; ALTER TABLE {t} ALTER u TYPE varchar(40)",
        SEEN,
        ("ALTER TABLE {t} RENAME v TO v_old",),
    ),
    "dropped": Remedy("ALTER TABLE {t} DROP a", SEEN, ("ALTER TABLE {t} RENAME a TO a_old",), ("mirror",)),
    "read_again": Remedy("ALTER TABLE {t} ALTER a TYPE bigint", SEEN, ("ALTER TABLE {t} RENAME a TO a_old",)),
    "name_taken": Remedy("ALTER TABLE {t} RENAME a TO b", OWN, ("ALTER TABLE {t} RENAME b TO b_own",)),
    "the_other_renamed": Remedy("ALTER TABLE {t} RENAME a TO b", OWN, ("ALTER TABLE {t} RENAME a TO a_old",)),
    "name_of_an_added_one_taken": Remedy(
        "ALTER TABLE {t} ADD b text DEFAULT 'x'",
        f"{OWN}; CREATE VIEW {{t}}_seen AS SELECT b FROM {{t}}",
        ("ALTER TABLE {t} RENAME b TO b_own",),
    ),
    "values_that_nothing_converts": Remedy(
        "ALTER TABLE {t} ALTER v TYPE int USING length(v)", "", ("ALTER TABLE {t} RENAME v TO v_old",), ("changelog",)
    ),
    "key": Remedy(
        "ALTER TABLE {t} ALTER id TYPE bigint",
        SEEN,
        ("ALTER TABLE {t} RENAME id TO id_old", "ALTER TABLE {t} RENAME id_old TO id; DROP VIEW {t}_seen"),
        ("mirror",),
    ),
}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_what_helps_against_a_refusal_loses_no_value(tables: Callable[..., Tables], mode: Mode) -> None:
    """Each case in a table of its own; one after the other stops the stream."""
    cases = {case: remedy for case, remedy in REMEDIES.items() if mode in remedy.modes}
    pipeline = tables(cases, mode)
    for case, remedy in cases.items():
        if remedy.obstacle:
            pipeline.target(remedy.obstacle.format(t=f"public.{case}"))
        pipeline.source(remedy.ddl.format(t=f"public.{case}"))
    pipeline.play(*DATA)
    left = {case: list(remedy.remedies) for case, remedy in cases.items()}
    while any(left.values()):
        with pytest.raises(CannotFollow) as refused:
            pipeline.apply()
        (case,) = (case for case in cases if f"public.{case} " in refused.value.message)
        pipeline.target(left[case].pop(0).format(t=f"public.{case}"))
    for _ in range(2):
        pipeline.apply()
        pipeline.assert_verified()
        pipeline.assert_values()
        pipeline.play(*DATA)


# -- crashes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("place", ["unit-cut", "before-redefinition", "after-redefinition"])
def test_a_crash_on_the_way(
    tables: Callable[..., Tables], monkeypatch: pytest.MonkeyPatch, mode: Mode, place: str
) -> None:
    """The unit that is cut ends at a commit record: the server sends that transaction again, and no earlier one."""
    pipeline = tables(["t"], mode)
    read = pipeline.reads()
    pipeline.play(*DATA, "ALTER TABLE {t} ADD b int DEFAULT 1", *DATA)
    monkeypatch.setenv(VARIABLE, f"{place}:error")
    with pytest.raises(Failpoint):
        pipeline.apply()
    monkeypatch.delenv(VARIABLE)
    pipeline.apply()
    pipeline.assert_same()
    assert pipeline.reads() == read, "it was followed in order"
    if mode == "changelog":
        count = "SELECT _op::text, count(*), count(DISTINCT (_commit_lsn, _seq)) FROM public.t GROUP BY 1 ORDER BY 1"
        assert pipeline.target_rows(count) == [("d", 2, 2), ("i", 2, 2), ("r", 12, 1), ("u", 8, 8)]


def test_a_batch_that_is_cut_leaves_no_staging(tables: Callable[..., Tables]) -> None:
    pipeline = tables(["t", "u"])
    pipeline.source(
        "INSERT INTO public.u (id, w) SELECT n, repeat('x', 500) FROM generate_series(100, 40099) n",
        "ALTER TABLE public.t ADD b int DEFAULT 1",
    )
    pipeline.play(*DATA)
    pipeline.apply()
    assert pipeline.target_rows("SELECT relname FROM pg_class WHERE starts_with(relname, 'stage_')") == []
    pipeline.assert_same()


# -- beside large transactions and the snapshot ----------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_a_transaction_larger_than_a_batch(tables: Callable[..., Tables], where: str) -> None:
    pipeline = tables(["t"], stream={"max_batch_bytes": "64KiB"})
    ddl = "ALTER TABLE public.t ADD b int DEFAULT 1"
    large = [
        f"INSERT INTO public.t (id, w) SELECT n, repeat('x', 100) FROM generate_series({i}, {i + 2999}) n"
        for i in (1000, 5000)
    ]
    script = {
        "before": [ddl, "BEGIN; " + "; ".join(large) + "; COMMIT"],
        "inside": ["BEGIN; " + f"; {ddl}; ".join(large) + "; COMMIT"],
        "after": ["BEGIN; " + "; ".join(large) + "; COMMIT", ddl],
    }[where]
    pipeline.play(*DATA)
    pipeline.source(*script)
    pipeline.play(*DATA)
    if where == "inside":
        with pytest.raises(StreamFailed, match="streamed again"):
            pipeline.apply()
    pipeline.apply()
    pipeline.assert_same()


@pytest.mark.parametrize(
    "ddl",
    [
        "ALTER TABLE public.t ADD b int DEFAULT 1",
        "ALTER TABLE public.t DROP a",
        "ALTER TABLE public.t ALTER v TYPE varchar(40); UPDATE public.t SET v = repeat('x', 40)",
        'ALTER TABLE public.t ALTER w TYPE text COLLATE "C"',
    ],
)
def test_ddl_between_chunks(databases: Databases, tmp_path: Path, ddl: str) -> None:
    """A chunk is not read under another definition than the chunks before it: the table is read again as a whole."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 4})
    pipeline.source(*(s.format(t="public.t") for s in (TABLE, ROWS)))
    record = pipeline.provision()
    pipeline.copy(0)
    pipeline.source(ddl, "UPDATE public.t SET w = 'after'")
    result = copy_chunk_of(pipeline.pipeline, pipeline.chunk(1).chunk)
    assert isinstance(result, SchemaChanged)
    with run_part(pipeline.pipeline, "snapshot-0", None) as (run, _):
        assert readopt(run, record.targets[0]) == 12
        assert readopt(run, record.targets[0]) == 0, "another part of the run has done it"
    assert not pipeline.record.unfinished
    pipeline.source("DELETE FROM public.t WHERE id = 3")
    pipeline.apply()
    pipeline.assert_equal()


def test_start_over_takes_the_definition_of_now(tables: Callable[..., Tables]) -> None:
    pipeline = tables(["t"])
    pipeline.source("ALTER TABLE public.t DROP a, ADD b int DEFAULT 1, ALTER v TYPE int USING length(v)")
    provisioning.start_over(pipeline.pipeline, takeover=False)
    pipeline.copy()
    pipeline.apply()
    pipeline.assert_same()
