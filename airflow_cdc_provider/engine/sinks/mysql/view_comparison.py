"""Compares the rows of a view with its SELECT, in one snapshot of a MySQL sink; see :mod:`.postgres.view_comparison`.

A transaction keeps the tables that it has named from being renamed or altered. Whether one was renamed before, but
after the snapshot, is seen in another session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from airflow_cdc_provider.engine.comparison.compare import NAMED, Difference, DifferenceKind
from airflow_cdc_provider.engine.comparison.view_result import ViewResult
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.types import MysqlColumnType, column_types
from airflow_cdc_provider.engine.sinks.mysql.view_definition import quoted_tables
from airflow_cdc_provider.engine.sinks.mysql.view_record import rows_table
from airflow_cdc_provider.engine.sinks.mysql.view_rows import ViewRows, hash_of
from airflow_cdc_provider.engine.views.version import ViewVersion

_FETCHED = 1000
# For the sizes for which neither the product nor the difference exceeds the type's range.
_CLOSE = (
    "({wanted} <=> {stored} OR IF(GREATEST(ABS({wanted}), ABS({stored})) BETWEEN 1e-290 AND 1e300,"
    " ABS({wanted} - {stored}) <= 1e-9 * GREATEST(ABS({wanted}), ABS({stored})), FALSE) IS TRUE)"
)


def without_table(label: str) -> UnknownTable:
    """Return the error for a view without its table."""
    return UnknownTable(
        f"view {label}: its table, or one that it reads, does not exist in the sink",
        f"Remove {label} from the pipeline file, run `airflow-cdc drop --views`, and add it again.",
    )


def lock_tables(session: Session, targets: Mapping[str, Target], version: ViewVersion) -> None:
    """Keep the tables of a view as they are until the transaction ends.

    :raises UnknownTable: when one does not exist.
    """
    names = [(targets[label].schema, targets[label].name) for label in version.view.columns if label in targets]
    names += [(version.view.schema if version.in_place else "airflow_cdc", version.relation)]
    names += [("airflow_cdc", version.queue)]
    if len(names) < len(version.view.columns) + 2 or not all(session.exists(*name) for name in names):
        raise without_table(version.view.label)
    for name in names:
        session.rows(f"SELECT 1 FROM {quoted(*name)} LIMIT 0")


def compare_view(session: Session, targets: Mapping[str, Target], version: ViewVersion) -> ViewResult:
    """Compare a view with its SELECT, in a transaction with a snapshot that has locked the tables."""
    view = version.view
    (count,) = session.one(f"SELECT COUNT(*) FROM {rows_table(version)}")
    kinds = column_types(targets[view.root.label].table)
    anchors = [kinds[each.column] for each in view.anchor]
    queued = unbuilt = different = 0
    named: list[Difference] = []
    for portion in session.stream(_query(session, targets, version, anchors), _FETCHED):
        for wanted, stored, is_queued, is_unbuilt, *key in portion:
            if int(is_queued):
                queued += 1
            elif int(is_unbuilt):
                unbuilt += 1
            else:
                different += 1
                if len(named) < NAMED:
                    kind: DifferenceKind = "missing" if not int(stored) else "extra" if not int(wanted) else "different"
                    texts = (_text(*pair) for pair in zip(anchors, key, strict=True))
                    outputs = (each.output for each in view.anchor)
                    named.append(Difference(dict(zip(outputs, texts, strict=True)), kind))
    return ViewResult(view.label, int(count), queued, unbuilt, tuple(named), different)


def _text(kind: MysqlColumnType, value: object) -> str | None:
    """Return the text of a value of a key, as Postgres writes it."""
    if value is None:
        return None
    text = value.decode() if isinstance(value, bytes) else str(value)
    found: str = kind.decode(pa.array([text], pa.large_string()))[0].as_py()
    return found


def _query(
    session: Session, targets: Mapping[str, Target], version: ViewVersion, anchors: Sequence[MysqlColumnType]
) -> str:
    """Return the query of the anchors that differ, are queued, or are not built."""
    view, view_rows = version.view, ViewRows(session, targets, version)
    types = dict(
        session.rows(
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = %s AND table_name = %s",
            [view.schema if version.in_place else "airflow_cdc", version.relation],
        )
    )
    outputs = [each.output for each in view.anchor]
    names = [output.name for output in view.outputs]
    floats = [n for n in names if view.grouped and n not in outputs and str(types[n]).lower() in ("float", "double")]
    exact = [name for name in names if name not in floats]
    places = range(len(floats))
    keys = ", ".join(f"k{n}" for n in range(len(anchors)))

    def side(number: int, anchor: Sequence[str], unbuilt: str, values: bool) -> str:
        columns = [f"{number} AS side", f"{unbuilt} AS unbuilt", f"{hash_of(anchor)} AS place"]
        columns += [f"{each} AS k{n}" for n, each in enumerate(anchor)]
        columns.append(f"{hash_of([f'r.{quoted(name)}' for name in exact]) if values else 'NULL'} AS texts")
        columns += [f"{f'r.{quoted(floats[n])}' if values else 'NULL'} AS f{n}" for n in places]
        return f"SELECT {', '.join(columns)}"

    anchor = [f"r.{quoted(output)}" for output in outputs]
    built = "FALSE" if version.built is None and not version.complete else view_rows.built(anchor)
    waiting = [f"r.a{n}" for n in range(len(anchors))]
    sides = [
        f"{side(1, anchor, f'NOT ({built})', True)} FROM ({view.select(quoted_tables(targets))}) r",
        f"{side(2, anchor, '0', True)} FROM {rows_table(version)} r",
        f"{side(3, waiting, '0', False)} FROM {quoted('airflow_cdc', version.queue)} r",
    ]
    close = " AND ".join(["TRUE", *(_CLOSE.format(wanted=f"w{n}", stored=f"s{n}") for n in places)])
    both = "".join(f", MAX(IF(side = 1, f{n}, NULL)) AS w{n}, MAX(IF(side = 2, f{n}, NULL)) AS s{n}" for n in places)
    shown = ", ".join(f"MIN({kind.read.format(f'k{n}')}) AS k{n}" for n, kind in enumerate(anchors))
    bags = (
        f"SELECT place, {', '.join(f'MIN(k{n}) AS k{n}' for n in range(len(anchors)))}, SUM(side = 1) AS of_select,"
        f" SUM(side = 2) AS of_view, MAX(side = 3) AS queued, MAX(unbuilt) AS unbuilt{both}"
        f" FROM ({' UNION ALL '.join(sides)}) AS sides GROUP BY place, texts"
    )
    compared = (
        f"SELECT place, {keys}, of_select, of_view, queued, unbuilt, of_select <> of_view OR NOT ({close}) AS differs"
    )
    return (
        f"SELECT SUM(of_select), SUM(of_view), MAX(queued), MAX(unbuilt), {shown}"
        f" FROM ({compared} FROM ({bags}) AS bags) AS compared GROUP BY place"
        f" HAVING MAX(differs) OR MAX(queued) OR MAX(unbuilt) ORDER BY {keys}"
    )
