"""Computes the rows that a changelog yields, change by change, without the engine's own comparison."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from psycopg2 import sql

from airflow_cdc_provider.engine.postgres.connection import Connection, connected, rows
from tests.support.pipelines import PipelineUnderTest

Row = tuple[str | None, ...]
UNKNOWN = "(not sent)"


def assert_same_values(
    pipeline: PipelineUnderTest,
    key: Sequence[str],
    columns: Sequence[str],
    *names: str,
    may_lack: Collection[str] = (),
) -> None:
    """Check that a target table, or the result of a changelog, holds the source's rows, value by value.

    The comparison uses the text that each server's output functions produce.

    :param key: columns by which changes identify rows.
    :param columns: all columns to compare, including those of the key.
    :param names: names of the schema and the table.
    :param may_lack: columns whose large values a changelog may never have received.
    """
    table = sql.Identifier(*names)
    with connected(pipeline.databases.source) as source, connected(pipeline.databases.target) as target:
        ours: list[Row] = rows(source, _texts(table, columns))
        theirs: list[Row] = rows(target, _texts(table, columns))
        if pipeline.pipeline.sink.mode == "changelog":
            theirs = fold(target, table, key, columns)
    places = [columns.index(name) for name in key]
    ours, theirs = (sorted(side, key=lambda row: [str(row[place]) for place in places]) for side in (ours, theirs))
    assert len(theirs) == len(ours), names
    for our_row, their_row in zip(ours, theirs, strict=True):
        for name, our_text, their_text in zip(columns, our_row, their_row, strict=True):
            if their_text != UNKNOWN or name not in may_lack:
                assert their_text == our_text, (names, our_row, name)


def fold(target: Connection, table: sql.Composable, key: Sequence[str], columns: Sequence[str]) -> list[Row]:
    """Return the rows that a changelog yields; a value that was not sent is taken from the previous row, if any."""
    found: dict[Row, Row] = {}
    query = _texts(table, columns, "_op, _before, _unchanged") + sql.SQL(" ORDER BY _commit_lsn, _seq")
    for op, before, unchanged, *texts in rows(target, query):
        if op == "t":
            found.clear()
            continue
        new: dict[str, str | None] = dict(zip(columns, texts, strict=True))
        # The old key has the column names of its time.
        earlier = found.pop(tuple((before or new).get(name, new[name]) for name in key), None)
        if op == "d":
            continue
        for name in unchanged or ():
            new[name] = UNKNOWN if earlier is None else earlier[columns.index(name)]
        found[tuple(new[name] for name in key)] = tuple(new[name] for name in columns)
    return list(found.values())


def _texts(table: sql.Composable, columns: Sequence[str], before: str = "") -> sql.Composed:
    # concat() calls the output function; a cast does not always do so.
    text = sql.SQL("CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.concat({0}) END")
    cells: list[sql.Composable] = [sql.SQL(before)] if before else []
    cells += [text.format(sql.Identifier(name)) for name in columns]
    return sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(cells), table)
