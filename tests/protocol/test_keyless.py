"""Mirrors of tables without a key: rows are identified by their values and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.changes.row_counts import count_rows
from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.core.errors import ConfigError, ProtocolError, TargetConflict, UncapturableTable
from tests.conftest import Databases
from tests.support.change_events import COLUMNS, Event, Row, changes_of
from tests.support.databases import transaction
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

# -- the net effect compared with replay ---------------------------------------------------------------

VALUES = [None, "", "a", "NULL", "1"]


def history(seed: int, steps: int) -> tuple[Counter[Row], list[Event]]:
    """Return a strategy for existing rows and changes of them; unchanged large values are not sent."""
    dice = Random(seed)

    def row(before: Row | None = None) -> Row:
        return tuple(before[c] if before and dice.random() < 0.6 else dice.choice(VALUES) for c in range(len(COLUMNS)))

    rows = Counter(row() for _ in range(dice.randint(0, 8)))
    start, events = Counter(rows), []
    for _ in range(steps):
        there = list(rows.elements())
        action = dice.choice("iiudduut" if dice.random() < 0.1 else "iudu")
        if action == "t":
            rows.clear()
            events.append(Event("t"))
        elif action == "i" or not there:
            rows[new := row()] += 1
            events.append(Event("i", new))
        else:
            old = dice.choice(there)
            rows[old] -= 1
            if action == "u":
                rows[new := row(old)] += 1
                same = (c for c in range(len(COLUMNS)) if new[c] is not None and new[c] == old[c])
                unchanged = frozenset(c for c in same if dice.random() < 0.5)
                events.append(Event("u", new, unchanged, old, "O"))
            else:
                events.append(Event("d", None, frozenset(), old, "O"))
    return start, events


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(0, 60), size=st.integers(1, 30))
def test_counted_pieces_do_what_the_changes_did(seed: int, steps: int, size: int) -> None:
    sink, events = history(seed, steps)
    source = Counter(sink)
    for start in range(0, len(events), size):
        piece = events[start : start + size]
        for event in piece:
            if event.op == "t":
                source.clear()
            if event.old:
                source[event.old] -= 1
            if event.new:
                source[event.new] += 1
        truncated_at = max((n for n, event in enumerate(piece) if event.op == "t"), default=-1)
        if truncated_at >= 0:
            sink.clear()
        counted = count_rows(changes_of(piece), np.ones(len(piece), dtype=np.bool_), truncated_at)
        rows = list(zip(*(column.to_pylist() for column in counted.rows.columns), strict=True))
        assert len(set(rows)) == len(rows)
        assert 0 not in counted.count
        for row, count in zip(rows, counted.count.tolist(), strict=True):
            sink[row] += count
            assert sink[row] >= 0
        assert +sink == +source


def test_only_kept_changes_count() -> None:
    rows: list[Row] = [("a", None, "", "x", "y"), ("b", None, "", "x", "y")]
    events = [
        Event("i", rows[0]),
        Event("u", rows[1], frozenset(), rows[0], "O"),
        Event("d", None, frozenset(), rows[1], "O"),
    ]
    counted = count_rows(changes_of(events), np.array([False, True, False]))
    assert counted.rows.column(0).to_pylist() == ["a", "b"]
    assert counted.count.tolist() == [-1, 1]
    nothing = count_rows(changes_of(events), np.zeros(3, dtype=np.bool_))
    assert nothing.rows.num_rows == 0
    assert nothing.rows.schema.types == [pa.large_string()] * len(COLUMNS)


@pytest.mark.parametrize("kind", ["", "K"])
def test_a_change_that_does_not_tell_its_row_is_an_error(kind: str) -> None:
    row: Row = ("a", "1", "b", "m", "w")
    event = Event("u", row, frozenset({2}), row if kind else None, kind)
    with pytest.raises(ProtocolError, match=r"public\.t does not carry the whole row"):
        count_rows(changes_of([event]), np.ones(1, dtype=np.bool_))


# -- through snapshot and stream ----------------------------------------------------------------------

BIG = "(SELECT string_agg(md5({} || '.' || i), '') FROM generate_series(1, 260) i)"
# Types without equality, types whose equality is coarser than their text, NULLs, and a word that looks like NULL.
TABLE = """
    CREATE TABLE public.t (n int, j json, p point, x numeric, c character(3), f float8, big text, "Te xt" text);
    ALTER TABLE public.t REPLICA IDENTITY FULL
"""
ROWS = f"""
    INSERT INTO public.t SELECT n, '{{"a":  1}}', '(1,2)', 1.0, 'a', 0, {BIG.format(7)}, ''
        FROM generate_series(1, 6) n, generate_series(1, n);
    INSERT INTO public.t SELECT NULL FROM generate_series(1, 3);
    INSERT INTO public.t (n, "Te xt") VALUES (NULL, 'NULL'), (NULL, '(),"'), (NULL, '');
    INSERT INTO public.t (n, x, f) VALUES (9, 1.00, '-0'), (9, 1.0, '0'), (9, 'NaN', 'NaN')
"""
CONTENTS = "SELECT ROW(t.*)::text, count(*) FROM public.t GROUP BY 1 ORDER BY 1"

Make = Callable[..., PipelineUnderTest]


@pytest.fixture
def make_pipeline(databases: Databases, tmp_path: Path) -> Make:
    """Return a factory of pipelines of ``public.t``, which has no key."""

    def make(table: str = TABLE, rows: str = ROWS) -> PipelineUnderTest:
        pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 2})
        pipeline.source(table, rows)
        return pipeline

    return make


def assert_equal(pipeline: PipelineUnderTest) -> None:
    assert pipeline.target_rows(CONTENTS) == pipeline.source_rows(CONTENTS)
    result = commands.verify(pipeline.pipeline)
    assert result["equal"], result
    assert result["not_compared"] == []
    assert [table["table"] for table in result["tables"]] == ["public.t"]


def one(n: int) -> str:
    return f"ctid = (SELECT min(ctid) FROM public.t WHERE n = {n})"


def test_snapshot_and_stream(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    record = pipeline.provision()
    assert [(c.chunk.lower, c.chunk.upper) for c in record.chunks] == [(None, None)]
    assert pipeline.target_rows("SELECT 1 FROM pg_index WHERE indrelid = 'public.t'::regclass") == []
    pipeline.source(f"DELETE FROM public.t WHERE {one(4)}", "INSERT INTO public.t (n) VALUES (20), (20)")
    open_changes = (
        f"UPDATE public.t SET x = 1.000 WHERE {one(5)}",
        f"UPDATE public.t SET n = 3 WHERE {one(6)}",
        "INSERT INTO public.t (n) VALUES (20)",
        f"DELETE FROM public.t WHERE {one(9)}",
    )
    with transaction(pipeline.databases.source, *open_changes) as open_:
        pipeline.copy()
        pipeline.source(f"UPDATE public.t SET p = '(3,4)' WHERE {one(2)}")
        open_.commit()
    pipeline.source("DELETE FROM public.t WHERE x = 'NaN'", "UPDATE public.t SET f = '0' WHERE f::text = '-0'")
    pipeline.apply()
    assert_equal(pipeline)

    pipeline.source(
        "UPDATE public.t SET n = 8 WHERE n = 1; UPDATE public.t SET n = 1 WHERE n = 2;"
        " INSERT INTO public.t (n) VALUES (8)",
        "UPDATE public.t SET j = '{\"a\": 1}' WHERE n = 6",
        'UPDATE public.t SET "Te xt" = NULL WHERE n = 1',
        f"DELETE FROM public.t WHERE {one(1)}",
        'DELETE FROM public.t WHERE ctid = (SELECT max(ctid) FROM public.t WHERE n IS NULL AND "Te xt" IS NULL)',
    )
    pipeline.apply()
    assert_equal(pipeline)


def test_truncate_and_a_transaction_in_many_pieces(make_pipeline: Make) -> None:
    """A piece deletes rows that an earlier piece of the same unit has written."""
    pipeline = make_pipeline()
    pipeline.change(stream={"max_batch_bytes": "1MiB"})
    pipeline.provision()
    pipeline.copy()
    pipeline.source(
        "INSERT INTO public.t (n) VALUES (30); TRUNCATE public.t; INSERT INTO public.t (n) VALUES (31), (31), (32);"
        " DELETE FROM public.t WHERE n = 32"
    )
    pipeline.apply()
    assert_equal(pipeline)
    pipeline.source(
        "INSERT INTO public.t (n, big) SELECT i % 7, repeat('x', 1500) FROM generate_series(1, 3000) i;"
        " UPDATE public.t SET n = n + 1; DELETE FROM public.t WHERE n = 3; UPDATE public.t SET n = 4 WHERE n = 5"
    )
    pipeline.apply()
    assert_equal(pipeline)


def test_reading_again(make_pipeline: Make) -> None:
    """The whole table is re-read ahead of the stream; a condition cannot select rows, because nothing names them."""
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    changes = (f"DELETE FROM public.t WHERE {one(6)}", "INSERT INTO public.t (n) VALUES (40), (40)")
    pipeline.source(*changes)
    pipeline.target(f"DELETE FROM public.t WHERE {one(5)}", "INSERT INTO public.t (n) VALUES (99)")
    with pytest.raises(ConfigError, match="has no key"):
        commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="n = 5")
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.source(*changes)
    pipeline.apply()
    assert_equal(pipeline)


def test_a_mirror_that_somebody_else_has_changed(make_pipeline: Make) -> None:
    """Copies cannot be distinguished, so a missing row would shift the damage to others."""
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.target(f"DELETE FROM public.t WHERE {one(6)}", "INSERT INTO public.t (n) VALUES (50), (50)")
    (table,) = commands.verify(pipeline.pipeline)["tables"]
    assert (table["source_rows"], table["target_rows"], table["difference_count"]) == (30, 31, 2)
    kinds = {d["key"]["n"]: (d["kind"], d["key"]["Te xt"]) for d in table["differences"]}
    assert kinds == {"6": ("different", ""), "50": ("extra", None)}
    pipeline.source("DELETE FROM public.t WHERE n = 6")
    with pytest.raises(TargetConflict, match=r"public\.t holds 5 of 6 rows that public\.t has deleted"):
        pipeline.apply()
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.apply()
    assert_equal(pipeline)


@pytest.mark.parametrize(
    "table",
    ["CREATE TABLE public.t (n int)", "CREATE TABLE public.t (n int); ALTER TABLE public.t REPLICA IDENTITY NOTHING"],
)
def test_without_a_full_identity_it_is_refused_at_once(make_pipeline: Make, table: str) -> None:
    pipeline = make_pipeline(table, "SELECT 1")
    with pytest.raises(UncapturableTable) as refused:
        pipeline.provision()
    assert refused.value.exit_code == 2
    assert "REPLICA IDENTITY" in refused.value.solution
    with psycopg.connect(pipeline.databases.source) as source:
        assert source.execute("SELECT slot_name FROM pg_replication_slots").fetchall() == []


def test_an_identity_that_is_taken_away(make_pipeline: Make) -> None:
    """The source's own statements then fail, except those that need no old row."""
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy()
    pipeline.source("ALTER TABLE public.t REPLICA IDENTITY DEFAULT")
    with pytest.raises(psycopg.Error, match="does not have a replica identity"):
        pipeline.source("DELETE FROM public.t")


def test_a_changelog_is_not_compared(databases: Databases, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": "changelog"})
    pipeline.source("CREATE TABLE public.t (n int)", "ALTER TABLE public.t REPLICA IDENTITY FULL")
    pipeline.provision()
    pipeline.copy_tables()
    assert cli.main(["verify", "--pipeline", str(pipeline.file)]) == 0
    assert "Not compared, because they are changelogs without a key: public.t." in capsys.readouterr().out
