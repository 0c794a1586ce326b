"""Views of the tortured mirror, and their comparison with their SELECTs in each read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from tests.torture.schema import Table

_READY = """
SELECT settings ->> 'name', settings ->> 'sql' FROM airflow_cdc.views
WHERE pipeline = %s AND complete AND kept AND behind_lsn IS NULL AND relation = settings ->> 'name'
"""
_SHOWN = 2


def views(tables: Sequence[Table]) -> dict[str, dict[str, Any]]:
    """Return views: rows of all kinds of tables joined, an aggregate, and many rows joined with many."""
    first, second = (table for table in tables if table.kind == "account")
    root, *others = (table for table in tables if table.kind != "account")
    keys = [f"r.{name} AS key{i}" for i, name in enumerate(root.key.names)]
    joined = [f"j{i}.version AS version{i}" for i in range(len(others))]
    joins = [f"LEFT JOIN {table.label} j{i} ON j{i}.n = r.n" for i, table in enumerate(others)]
    return {
        "views.wide": {
            "sql": f"SELECT {', '.join([*keys, 'r.n', 'r.version', *joined])} FROM {root.label} r {' '.join(joins)}",
            "max_rows": 200,
        },
        "views.balances": {
            "sql": f"SELECT a.balance, count(*) AS accounts, sum(b.balance) AS of_others FROM {first.label} a"
            f" LEFT JOIN {second.label} b ON b.n = a.n GROUP BY a.balance",
        },
        "views.rich": {
            "sql": f"SELECT a.id, a.n, b.n AS other FROM {first.label} a JOIN {second.label} b"
            " ON b.balance = a.balance AND b.n < a.n",
            "refresh": "500 ms",
        },
    }


def compare_views(connection: psycopg.Connection[Any], pipeline: str) -> tuple[int, list[str]]:
    """Compare the views that are up to date with their SELECTs, in the snapshot of an open transaction.

    :returns: the number of compared views, and the differences.
    """
    if connection.execute("SELECT to_regclass('airflow_cdc.views')").fetchone() == (None,):
        return 0, []
    wrong, ready = [], connection.execute(_READY, [pipeline]).fetchall()
    for name, select in ready:
        for kind, one, other in (("lacks", select, f"TABLE views.{name}"), ("has", f"TABLE views.{name}", select)):
            query = f"SELECT a::text FROM ({one}) a EXCEPT ALL SELECT b::text FROM ({other}) b"
            found = connection.execute(query.encode()).fetchall()
            wrong += [f"view {name} {kind} {row[0][:200]} ({len(found)} rows differ)" for row in found[:_SHOWN]]
    return len(ready), wrong


def settings_of(mode: str, tables: Sequence[Table]) -> Mapping[str, Any]:
    """Return the sink's section; a changelog has no views."""
    return {"mode": mode, **({"views": views(tables)} if mode == "mirror" else {})}
