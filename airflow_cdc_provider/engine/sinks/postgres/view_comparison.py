"""Compares the rows of a view with its SELECT, in one snapshot of a Postgres sink.

One snapshot shows view and mirror at the same commit, so the comparison is exact while a stream runs. Rows are compared
as bags, by the exact texts of their values: for each anchor and row, the copies in the view and in the SELECT are
counted in one pass. Sums of floating-point numbers depend on the order of the rows, so floating-point columns of a
grouped view may differ by a relative error of 1e-9.

A snapshot does not protect against the exchange of the view's table, or against a change of its definition. Therefore
all tables are locked, in the weakest mode, before the snapshot is taken. The locks are not waited for, since a session
that holds locks of other tables meanwhile could end in a deadlock with a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.comparison.compare import NAMED, PASS_TIMEOUT, Difference
from airflow_cdc_provider.engine.comparison.view_result import ViewResult
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.sinks.postgres.view_record import read_versions
from airflow_cdc_provider.engine.sinks.postgres.view_rows import ViewRows, listed
from airflow_cdc_provider.engine.views.recorded import compared_version
from airflow_cdc_provider.engine.views.version import ViewVersion

_FLOATS = """
SELECT attname::text FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
  AND atttypid IN ('float4'::regtype, 'float8'::regtype)
"""
# Of the sizes for which neither the product nor the difference exceeds the type's range.
_CLOSE = """
CASE WHEN {wanted} IS NOT DISTINCT FROM {stored} THEN true
WHEN greatest(abs({wanted}), abs({stored})) BETWEEN 1e-290 AND 1e300
THEN coalesce(abs({wanted} - {stored}) <= 1e-9 * greatest(abs({wanted}), abs({stored})), false)
ELSE false END
"""
_COMPARED = """
WITH anchors AS MATERIALIZED (
    SELECT {keys}, sum(wanted) AS wanted, sum(stored) AS stored, bool_or(queued) AS queued,
           bool_or(unbuilt) AS unbuilt, bool_or(different) AS different
    FROM (
        SELECT {keys}, wanted, stored, queued, unbuilt, wanted <> stored OR NOT ({close}) AS different
        FROM (
            SELECT {keys}, count(*) FILTER (WHERE side = 1) AS wanted, count(*) FILTER (WHERE side = 2) AS stored,
                   bool_or(side = 3) AS queued, bool_or(unbuilt) AS unbuilt {floats}
            FROM (SELECT {wanted}, 1 AS side, NOT {built} AS unbuilt FROM ({select}) r
                  UNION ALL SELECT {stored}, 2, false FROM {relation} r
                  UNION ALL SELECT {waiting}, 3, false FROM {queue} r) AS sides
            GROUP BY {keys}, texts
        ) AS bags
    ) AS compared
    GROUP BY {keys}
    HAVING bool_or(different) OR bool_or(queued) OR bool_or(unbuilt)
)
SELECT count(*) FILTER (WHERE queued), count(*) FILTER (WHERE unbuilt AND NOT queued),
       count(*) FILTER (WHERE different AND NOT queued AND NOT unbuilt), NULL::text[], NULL FROM anchors
UNION ALL
(SELECT NULL, NULL, NULL, ARRAY[{key_texts}],
        CASE WHEN stored = 0 THEN 'missing' WHEN wanted = 0 THEN 'extra' ELSE 'different' END
 FROM anchors WHERE different AND NOT queued AND NOT unbuilt
 ORDER BY 4 LIMIT {limit})
"""


def compare_view(connection: Connection, pipeline: str, targets: Mapping[str, Target], label: str) -> ViewResult | None:
    """Compare a view with its SELECT.

    :param connection: an autocommit connection to the sink.
    :param targets: the recorded targets by label.
    :param label: the view's label.
    :returns: ``None`` if the view is not recorded any more.
    :raises UnknownTable: if its table does not exist.
    :raises TableLocked: if a table stays locked.
    """
    found: list[ViewResult | None] = []
    locked: list[psycopg2.Error] = []

    def compared() -> bool:
        now = compared_version(read_versions(connection, pipeline), label)
        if now is None or not now.relation:
            found.append(None if now is None else ViewResult(label))
            return True
        if not now.view.columns.keys() <= targets.keys():
            raise _without_table(label)
        rows(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            _lock(connection, targets, now)
            # The first query takes the snapshot. If the view has been exchanged since it was looked up, try again.
            if _is_recorded(connection, pipeline, now):
                found.append(_compare(connection, pipeline, targets, now))
        except psycopg2.errors.LockNotAvailable as e:
            locked.append(e)
        except psycopg2.errors.UndefinedTable as e:
            rows(connection, "ROLLBACK")
            if _is_recorded(connection, pipeline, now):
                raise _without_table(label) from e
        finally:
            if not connection.closed:
                rows(connection, "ROLLBACK")
        return bool(found)

    if not await_condition(compared, PASS_TIMEOUT):
        raise locked[-1]  # a table is read again for a long time
    return found[0]


def _without_table(label: str) -> UnknownTable:
    return UnknownTable(
        f"view {label}: its table, or one that it reads, does not exist in the sink",
        "Start the stream again: a view whose table has been dropped is built again.",
    )


def _is_recorded(connection: Connection, pipeline: str, version: ViewVersion) -> bool:
    """Return whether a version still has the same table."""
    return any(
        (each.number, each.relation, each.kept) == (version.number, version.relation, version.kept)
        for each in read_versions(connection, pipeline)
    )


def _lock(connection: Connection, targets: Mapping[str, Target], version: ViewVersion) -> None:
    read = [sql.Identifier(targets[label].schema, targets[label].name) for label in version.view.columns]
    own = [sql.Identifier(version.view.schema, version.relation), sql.Identifier("airflow_cdc", version.queue)]
    rows(connection, sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE NOWAIT").format(listed([*own, *read])))


def _compare(connection: Connection, pipeline: str, targets: Mapping[str, Target], found: ViewVersion) -> ViewResult:
    (version,) = (each for each in read_versions(connection, pipeline) if each.number == found.number)
    view, view_rows = version.view, ViewRows(connection, targets, version)
    count = int(scalar(connection, sql.SQL("SELECT count(*) FROM {}").format(view_rows.relation)))
    anchor = {each.output: n for n, each in enumerate(view.anchor)}
    names = [output.name for output in view.outputs]
    keys = [sql.SQL(f"k{n}") for n in range(len(anchor))]
    table = view_rows.relation.as_string(connection)
    floats = {name for (name,) in rows(connection, _FLOATS, [table]) if view.grouped and name not in anchor}
    # Equal anchors of GROUP BY may have several texts, such as 1.0 and 1.00, of which any may be shown.
    texts = [name for name in names if name not in floats and not (view.grouped and name in anchor)]
    places = [sql.SQL(f"f{n}") for n in range(len(floats))]

    def side(anchors: Sequence[sql.Composable], values: bool) -> sql.Composable:
        cells = listed(sql.SQL('r.{}::text COLLATE "C"').format(sql.Identifier(name)) for name in texts)
        columns = [sql.SQL("{} AS {}").format(*pair) for pair in zip(anchors, keys, strict=True)]
        columns.append(
            sql.SQL("{} AS texts").format(sql.SQL("ARRAY[{}]::text[]").format(cells) if values else _NOTHING)
        )
        for name, place in zip(sorted(floats), places, strict=True):
            value = sql.SQL("r.{}::float8").format(sql.Identifier(name)) if values else sql.SQL("NULL")
            columns.append(sql.SQL("{} AS {}").format(value, place))
        return listed(columns)

    outputs = [sql.SQL("r.{}").format(sql.Identifier(name)) for name in anchor]
    built = sql.SQL("false") if version.built is None and not version.complete else view_rows.built(outputs)
    query = sql.SQL(_COMPARED).format(
        keys=listed(keys),
        key_texts=listed(sql.SQL('{}::text COLLATE "C"').format(key) for key in keys),
        wanted=side(outputs, True),
        stored=side(outputs, True),
        waiting=side([sql.SQL(f"r.a{n}") for n in range(len(anchor))], False),
        built=built,
        select=view_rows.select,
        relation=view_rows.relation,
        queue=sql.Identifier("airflow_cdc", version.queue),
        floats=sql.SQL("").join(
            sql.SQL(
                ", max({place}) FILTER (WHERE side = 1) AS {wanted}, max({place}) FILTER (WHERE side = 2) AS {stored}"
            ).format(place=place, wanted=wanted, stored=stored)
            for place, (wanted, stored) in zip(places, map(_sides_of, range(len(places))), strict=True)
        ),
        close=sql.SQL(" AND ").join(
            [
                sql.SQL("true"),
                *(
                    sql.SQL(_CLOSE).format(wanted=wanted, stored=stored)
                    for wanted, stored in map(_sides_of, range(len(places)))
                ),
            ]
        ),
        limit=sql.Literal(NAMED),
    )
    (queued, unbuilt, different, _, _), *named = rows(connection, query)
    differences = tuple(Difference(dict(zip(anchor, key, strict=True)), kind) for *_, key, kind in named)
    return ViewResult(view.label, count, queued, unbuilt, differences, different)


_NOTHING = sql.SQL("NULL::text[]")


def _sides_of(place: int) -> tuple[sql.Composable, sql.Composable]:
    """Return the values of a floating-point column on both sides."""
    return sql.SQL(f"w{place}"), sql.SQL(f"s{place}")
