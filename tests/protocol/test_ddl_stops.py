"""DDL that the stream cannot follow: it stops before the DDL, and continues after the repair that the error names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from psycopg2 import sql

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow, ForeignTable
from airflow_cdc_provider.engine.postgres.connection import connected
from tests.conftest import Databases
from tests.protocol.ddl_tables import DATA, ROWS, TABLE, Mode, Tables, tables
from tests.support.changelogs import fold
from tests.support.pipelines import PipelineUnderTest

__all__ = ["tables"]

pytestmark = pytest.mark.slow


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

    :param ddl: statements at the source, between data.
    :param words: pattern of the error.
    :param repair: pattern of its solution.
    :param written: the table that data is written to afterwards, ``None`` for no data.
    :param after: the table that continues, ``None`` if it is gone.
    :param first: statements at the source before the stream is applied.
    :param target: statements at the target.
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
    "recreated": Stop(ANEW, "recreated", resnapshot),
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
    for _ in range(2):  # continuing without the repair changes nothing
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
    """An obstacle at the target, and its remedy each time that the stream stops."""

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
    """Each case has its own table; one after the other stops the stream."""
    cases = {case: remedy for case, remedy in REMEDIES.items() if mode in remedy.modes}
    pipeline = tables(cases, mode)
    for case, remedy in cases.items():
        if remedy.obstacle:
            pipeline.target(remedy.obstacle.format(t=f"public.{case}"))
        pipeline.source(remedy.ddl.format(t=f"public.{case}"))
    pipeline.play(*DATA)
    left = {case: list(remedy.remedies) for case, remedy in cases.items()}
    while any(left.values()):
        # Before a table is re-read, its target is checked like any other; without the key it is refused.
        with pytest.raises((CannotFollow, ForeignTable)) as refused:
            pipeline.apply()
        (case,) = (case for case in cases if f"public.{case} " in refused.value.message)
        pipeline.target(left[case].pop(0).format(t=f"public.{case}"))
    for _ in range(2):
        pipeline.apply()
        pipeline.assert_verified()
        pipeline.assert_values()
        pipeline.play(*DATA)
