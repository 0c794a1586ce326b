"""DDL at the source while the pipeline runs: the stream follows it in order, or re-reads the table.

Every script runs while the stream does not read, so that it arrives as one batch. The stream must then follow DDL
exactly where it occurs between the changes. At the end the target is compared with the source value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine.core.errors import Failpoint, SchemaChanged, StreamFailed
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import reread_changed
from tests.conftest import Databases, ServerMaker
from tests.protocol.ddl_tables import DATA, ROWS, TABLE, Mode, Tables, tables
from tests.support.engine_parts import copy_chunk_of
from tests.support.pipelines import PipelineUnderTest

__all__ = ["tables"]

pytestmark = pytest.mark.slow


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


# The same bits are now interpreted differently, at the source only.
READ_AGAIN |= {
    "reg": [NAMED, "ALTER TABLE {t} ALTER a TYPE regclass"],
    "reg_and_back": [NAMED, "ALTER TABLE {t} ALTER a TYPE regclass", *DATA, "ALTER TABLE {t} ALTER a TYPE oid"],
}


# In a changelog the values of deleted rows would have to be converted too.
MIRROR_ONLY = {
    "unlike": ["ALTER TABLE {t} ALTER a TYPE int[] USING ARRAY[a]"],
    "swap": [
        "BEGIN; ALTER TABLE {t} RENAME a TO x; ALTER TABLE {t} RENAME v TO a; ALTER TABLE {t} RENAME x TO v; COMMIT"
    ],
}


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
    """Older servers have other catalogs, and so do newer ones."""
    binaries = None if version == "18" else request.getfixturevalue("system_binaries")
    source = make_server("18", binaries=binaries).dsn()
    tables = Tables(tmp_path, Databases(source, databases.target), list(TYPICAL), "mirror", pipeline="ddl")
    assert_followed(tables, TYPICAL)


KEYLESS = "CREATE TABLE {t} (id int, a int, v varchar(10), w text); ALTER TABLE {t} REPLICA IDENTITY FULL"


# Postgres does not allow changes of columns in a publication's row filter or column list.
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
    """Play data, DDL and data in one batch, and check that it is followed if possible; ``not_seen`` is not captured."""
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
    """All of it arrives in one batch, table by table; then in a separate batch per table."""
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
    """A chunk is never read under a different definition than earlier chunks: the whole table is re-read."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 4})
    pipeline.source(*(s.format(t="public.t") for s in (TABLE, ROWS)))
    record = pipeline.provision()
    pipeline.copy(0)
    pipeline.source(ddl, "UPDATE public.t SET w = 'after'")
    result = copy_chunk_of(pipeline.pipeline, pipeline.chunk(1).chunk)
    assert isinstance(result, SchemaChanged)
    with run_part(pipeline.pipeline, "snapshot-0", None) as (run, _):
        assert reread_changed(run, record.targets[0]) == 12
        assert reread_changed(run, record.targets[0]) == 0, "another part of the run has done it"
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
