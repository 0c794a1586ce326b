"""Rows are transformed on every path to a sink: chunks, the stream with values that were not sent, and re-reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.changes.row_transform import Identity, transformed_effect, transformed_rows
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.table import Column, Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.sink_checks import targets_of
from tests.conftest import Databases
from tests.sinks.begun_sink import WATERMARK
from tests.support.given_rows import GivenRows
from tests.support.pipelines import PipelineUnderTest

TABLE = Table(
    1,
    "public",
    "t",
    (Column("body", "text", 25, None, False, True), Column("id", "text", 25, None, True, True)),
    ("id",),
    "d",
    None,
    (),
    "r",
)


@dataclass(frozen=True)
class Capitals:
    """Texts outside the key in capitals."""

    def table(self, table: Table) -> Table:
        return replace(table, columns=tuple(replace(column, not_null=False) for column in table.columns))

    def columns(self, table: Table, columns: Mapping[int, pa.ChunkedArray]) -> Mapping[int, pa.ChunkedArray]:
        return {place: pc.utf8_upper(column) for place, column in columns.items()}


def test_what_is_not_transformed_is_not_touched() -> None:
    """Rows in the format of the source's COPY stay in it."""
    rows = GivenRows([pa.record_batch([pa.array(["a"]), pa.array(["1"])], names=["body", "id"])], pytest.fail)
    effect = Effect("public.t", False, pa.table({"c0": ["a"], "c1": ["1"]}))
    assert transformed_rows(Identity(), TABLE, rows) is rows
    assert transformed_effect(Identity(), TABLE, effect) is effect


def test_rows_that_are_read() -> None:
    batch = pa.record_batch([pa.array(["a", None]), pa.array(["x", "y"])], names=["f0", "f1"])
    made = transformed_rows(Capitals(), TABLE, GivenRows([batch], lambda: WATERMARK))
    assert not made.can_copy
    (changed,) = made.batches()
    assert changed.to_pydict() == {"f0": ["A", None], "f1": ["x", "y"]}
    assert made.finish() is WATERMARK


def test_new_rows_and_old_rows_of_an_effect() -> None:
    """Nothing else of the effect changes."""
    rows = pa.table(
        {
            "erased": [False, True],
            "c0": pa.array(["a", None], pa.large_string()),
            "c1": ["x", "y"],
            "missing": ["{0}", None],
            "o0": ["w", None],
            "b0": ["old", None],
            "b1": ["x", None],
        }
    )
    fresh = np.array([True, False])
    made = transformed_effect(Capitals(), TABLE, Effect("public.t", True, rows, fresh))
    assert made.rows.to_pydict() == {
        "erased": [False, True],
        "c0": ["A", None],
        "c1": ["x", "y"],
        "missing": ["{0}", None],
        "o0": ["w", None],
        "b0": ["OLD", None],
        "b1": ["x", None],
    }
    assert (made.label, made.truncate, made.fresh) == ("public.t", True, fresh)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_every_way_to_a_sink(databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(Pipeline, "transform", Capitals())
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode})
    pipeline.source(
        "CREATE TABLE public.t (id text PRIMARY KEY, body text, big text)",
        "ALTER TABLE public.t ALTER COLUMN big SET STORAGE EXTERNAL",
        "INSERT INTO public.t VALUES ('a', 'read', repeat('b', 5000)), ('b', 'read', NULL), ('c', 'read', NULL)",
    )
    pipeline.provision()
    (target,) = pipeline.record.targets
    assert (target,) == tuple(targets_of(pipeline.pipeline, [target.table]))
    assert not any(column.not_null for column in target.table.columns)
    pipeline.copy()
    pipeline.source(
        "UPDATE public.t SET body = 'streamed' WHERE id = 'a'",
        "UPDATE public.t SET id = 'd' WHERE id = 'b'",
        "DELETE FROM public.t WHERE id = 'c'",
    )
    pipeline.apply()
    if mode == "mirror":
        found = pipeline.target_rows("SELECT id, body, left(big, 3), length(big) FROM public.t ORDER BY 1")
        assert found == [("a", "STREAMED", "BBB", 5000), ("d", "READ", None, None)]
    else:
        query = "SELECT _op, id, body, _before ->> 'id' FROM public.t WHERE _op <> 'r' ORDER BY _commit_lsn, _seq"
        assert pipeline.target_rows(query) == [
            ("u", "a", "STREAMED", None),
            ("u", "d", "READ", "b"),
            ("d", "c", None, "c"),
        ]
    pipeline.source("UPDATE public.t SET body = 'read again' WHERE id = 'd'")
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    op = "" if mode == "mirror" else " WHERE _op = 'r'"
    assert ("d", "READ AGAIN") in pipeline.target_rows(f"SELECT id, body FROM public.t{op}")
