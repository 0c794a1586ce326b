"""Objects that a target table may have in addition to the mirror's rows: keys, triggers, policies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import ForeignTable, MissingPrivilege, TargetConflict
from tests.protocol.two_row_chunks import Make, make_pipeline
from tests.support.engine_parts import copy_chunk_of
from tests.support.pipelines import PipelineUnderTest

__all__ = ["make_pipeline"]

pytestmark = pytest.mark.slow

TWO_TABLES = (
    "CREATE TABLE public.a (id int PRIMARY KEY, name text)",
    "CREATE TABLE public.b (id int PRIMARY KEY, a int REFERENCES public.a ON DELETE CASCADE)",
    "INSERT INTO public.a SELECT i, 'a' || i FROM generate_series(1, 4) i",
    "INSERT INTO public.b SELECT i, i FROM generate_series(1, 4) i",
)


# A child before its parent in the order of tables, names swapped, a parent replaced, a cascade.
UNITS = (
    "BEGIN; INSERT INTO public.a VALUES (5, 'a5'); INSERT INTO public.b VALUES (5, 5), (6, 5); COMMIT",
    "BEGIN; UPDATE public.a SET name = 'tmp' WHERE id = 1; UPDATE public.a SET name = 'a1' WHERE id = 2;"
    " UPDATE public.a SET name = 'a2' WHERE id = 1; COMMIT",
    "DELETE FROM public.a WHERE id = 3",
    "BEGIN; INSERT INTO public.a VALUES (7, 'a7'); UPDATE public.b SET a = 7 WHERE a = 4;"
    " DELETE FROM public.a WHERE id = 4; COMMIT",
    "BEGIN; UPDATE public.b SET a = NULL; TRUNCATE public.a CASCADE; INSERT INTO public.a VALUES (8, 'a8');"
    " INSERT INTO public.b VALUES (8, 8); COMMIT",
)


@pytest.fixture
def mirrored(make_pipeline: Make) -> PipelineUnderTest:
    """Return two tables, one of which refers to the other, whose mirror is consistent."""
    pipeline = make_pipeline()
    pipeline.source(*TWO_TABLES)
    pipeline.provision()
    pipeline.copy_tables()
    pipeline.apply()
    assert pipeline.record.consistent
    return pipeline


def assert_mirrored(pipeline: PipelineUnderTest) -> None:
    for table in ("public.a", "public.b"):
        pipeline.assert_equal(table)


def test_deferrable_constraints_on_the_target(mirrored: PipelineUnderTest) -> None:
    """They are checked at the end of a unit, which is a state of the source once the mirror is ``consistent``."""
    mirrored.target(
        "ALTER TABLE public.a ADD UNIQUE (name) DEFERRABLE",
        "ALTER TABLE public.b ADD FOREIGN KEY (a) REFERENCES public.a DEFERRABLE",
    )
    for unit in UNITS:
        mirrored.source(unit)
        mirrored.apply()
        assert_mirrored(mirrored)
    mirrored.source(*TWO_TABLES[2:3], "INSERT INTO public.b VALUES (1, 1)")
    commands.resnapshot(mirrored.pipeline, tables=["public.a"])
    mirrored.apply()
    assert_mirrored(mirrored)


@dataclass(frozen=True)
class Obstacle:
    """An obstacle on the target, how it is reported, and how it is removed."""

    carries: str
    change: str
    says: str
    solution: str
    remove: str


COUNT = "CREATE FUNCTION public.f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {} RETURN NEW; END $$"


TRIGGER = "CREATE TRIGGER f BEFORE INSERT OR UPDATE ON public.a FOR EACH ROW EXECUTE FUNCTION public.f()"


DISABLE = "ALTER TABLE public.a DISABLE TRIGGER f"


OBSTACLES = {
    "unique, swapped": Obstacle(
        "ALTER TABLE public.a ADD CONSTRAINT names UNIQUE (name)",
        UNITS[1],
        "names",
        "DEFERRABLE",
        "ALTER TABLE public.a DROP CONSTRAINT names",
    ),
    "unique that the source lacks": Obstacle(
        "ALTER TABLE public.a ADD CONSTRAINT names UNIQUE (name) DEFERRABLE",
        "UPDATE public.a SET name = 'same'",
        "names",
        "drop it",
        "ALTER TABLE public.a DROP CONSTRAINT names",
    ),
    "foreign key": Obstacle(
        "CREATE TABLE public.mine (a int CONSTRAINT mine REFERENCES public.a); INSERT INTO public.mine VALUES (3)",
        UNITS[2],
        "mine",
        "DEFERRABLE",
        "DROP TABLE public.mine",
    ),
    "trigger that refuses": Obstacle(
        f"{COUNT.format('RAISE EXCEPTION $m$not here$m$;')}; {TRIGGER}",
        UNITS[0],
        "not here",
        "DISABLE TRIGGER",
        DISABLE,
    ),
    "trigger that fails": Obstacle(
        f"{COUNT.format('PERFORM count(*) FROM a;')}; {TRIGGER}",
        UNITS[0],
        'relation "a" does not exist',
        "search_path",
        DISABLE,
    ),
    "lost key": Obstacle(
        "ALTER TABLE public.a DROP CONSTRAINT a_pkey",
        UNITS[1],
        "lost the unique index",
        "airflow-cdc preflight",
        "ALTER TABLE public.a ADD PRIMARY KEY (id)",
    ),
}


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES.keys())
def test_what_the_target_refuses_is_said_and_nothing_is_lost(mirrored: PipelineUnderTest, obstacle: Obstacle) -> None:
    mirrored.target(obstacle.carries)
    before = mirrored.target_rows("SELECT * FROM public.a ORDER BY 1"), mirrored.record.applied
    mirrored.source(obstacle.change)
    with pytest.raises(TargetConflict) as refused:
        mirrored.apply()
    assert obstacle.says in refused.value.message
    assert obstacle.solution in refused.value.solution
    assert refused.value.exit_code == 3
    assert before == (mirrored.target_rows("SELECT * FROM public.a ORDER BY 1"), mirrored.record.applied)
    mirrored.target(obstacle.remove)
    mirrored.apply()
    assert_mirrored(mirrored)


def test_preflight_names_a_lost_key(mirrored: PipelineUnderTest) -> None:
    mirrored.target("ALTER TABLE public.a DROP CONSTRAINT a_pkey")
    with pytest.raises(ForeignTable, match=r"no usable unique key on \(id\)") as named:
        commands.preflight(mirrored.pipeline)
    assert 'ALTER TABLE "public"."a" ADD UNIQUE ("id");' in named.value.solution


def test_a_foreign_key_before_the_mirror_is_consistent(make_pipeline: Make) -> None:
    """The child's chunk is younger than the parent's: no order of tables could satisfy the target."""
    pipeline = make_pipeline()
    pipeline.source(*TWO_TABLES)
    pipeline.target(
        "CREATE TABLE public.a (id int PRIMARY KEY, name text)",
        "CREATE TABLE public.b (id int PRIMARY KEY, a int CONSTRAINT refers REFERENCES public.a DEFERRABLE)",
    )
    pipeline.provision()
    pipeline.copy(table="public.a")
    pipeline.source("BEGIN; INSERT INTO public.a VALUES (9, 'a9'); INSERT INTO public.b VALUES (9, 9); COMMIT")
    pipeline.copy(0, table="public.b")
    (last,) = (c.chunk for c in pipeline.record.chunks if c.chunk.table == "public.b" and c.chunk.upper is None)
    result = copy_chunk_of(pipeline.pipeline, last)
    assert isinstance(result, TargetConflict)
    assert "refers" in result.message
    assert "consistent" in result.solution
    pipeline.target("ALTER TABLE public.b DROP CONSTRAINT refers")
    pipeline.copy(table="public.b")
    pipeline.apply()
    assert_mirrored(pipeline)
    pipeline.target("ALTER TABLE public.b ADD FOREIGN KEY (a) REFERENCES public.a DEFERRABLE")


def test_a_trigger_of_the_target_fires(mirrored: PipelineUnderTest) -> None:
    """It fires once for each row that a unit writes, which is less often than the source changes rows."""
    mirrored.target(
        "CREATE TABLE public.log (id int, name text)",
        COUNT.format("INSERT INTO public.log VALUES (NEW.id, NEW.name);"),
        TRIGGER,
    )
    mirrored.source("UPDATE public.a SET name = 'x' WHERE id = 1; UPDATE public.a SET name = 'y' WHERE id = 1")
    mirrored.apply()
    # An upsert of an existing row fires the trigger for the insert that it tries, and for the update.
    assert set(mirrored.target_rows("SELECT * FROM public.log")) == {(1, "y")}
    assert_mirrored(mirrored)


def test_a_key_that_the_target_compares_otherwise(make_pipeline: Make) -> None:
    """Two keys of the source are equal on the target, but must not become one row."""
    pipeline = make_pipeline("public.t")
    pipeline.source("CREATE TABLE public.t (k text PRIMARY KEY, n int)", "INSERT INTO public.t VALUES ('1.0', 1)")
    pipeline.target("CREATE TABLE public.t (k numeric PRIMARY KEY, n int)")
    pipeline.change(sink={"types": "convert"})
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.source("BEGIN; INSERT INTO public.t VALUES ('1.000', 2); DELETE FROM public.t WHERE k = '1.000'; COMMIT")
    pipeline.apply()
    pipeline.assert_equal("(SELECT k::text, n FROM public.t) AS rows")
    pipeline.source("INSERT INTO public.t VALUES ('1.00', 2)")
    with pytest.raises(TargetConflict, match=r"treats \(1\.0\) and \(1\.00\) as equal"):
        pipeline.apply()
    assert pipeline.target_rows("SELECT k::text, n FROM public.t") == [("1.0", 1)]


def test_policies_on_the_target_never_hide_rows(mirrored: PipelineUnderTest) -> None:
    mirrored.target(
        "ALTER TABLE public.a ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE public.a FORCE ROW LEVEL SECURITY",
        "CREATE POLICY beyond_one ON public.a USING (id > 1) WITH CHECK (true)",
    )
    mirrored.source("DELETE FROM public.a WHERE id = 1")
    with pytest.raises(MissingPrivilege, match="row-level security"):
        mirrored.apply()
    mirrored.target("ALTER TABLE public.a NO FORCE ROW LEVEL SECURITY")
    mirrored.apply()
    assert_mirrored(mirrored)
