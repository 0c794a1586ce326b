"""pg_ivm, an extension of Postgres whose triggers keep a table equal to a SELECT, and ``REFRESH MATERIALIZED VIEW``.

Its triggers fire in the session that changes the tables. So its table does not follow a mirror that a subscription
fills: an apply worker runs with ``session_replication_role = replica``. Here, the units are written into one database,
without the extension's table and with it.

It is left out unless the target server offers the extension. Build it from its sources with PGXS, for the server of
:func:`.find_binaries`: ``make install PG_CONFIG=…/bin/pg_config with_llvm=no``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.lab import Lab, create_database, drop_database, execute, query
from benchmarks.orders import COLUMNS, KEYED, TABLES, UNITS, Unit, fill
from benchmarks.report import check

PG_IVM = "pg_ivm"
LEFT_OUT = f"{PG_IVM} is left out, because the target server does not offer it"


@dataclass(frozen=True)
class Local:
    """What a wide table costs in the database of the tables.

    :param plain: seconds a unit without it.
    :param kept: seconds a unit with pg_ivm's table, unless the server does not offer the extension.
    :param refresh: seconds of a refresh.
    """

    plain: float
    kept: float | None
    refresh: float


def measure(lab: Lab, orders: int) -> Local:
    """Write units without the wide table, with it, and refresh a materialized view.

    :raises WrongResult: if the table differs from its SELECT.
    """
    create_database(lab.target, PG_IVM)
    dsn = lab.target.dsn(PG_IVM)
    joined = (f"CREATE INDEX ON public.orders ({column})" for column in ("customer_id", "product_id"))
    execute(dsn, *TABLES, *fill(orders), *joined)
    plain, kept = _write(lab, dsn, orders, 0), None
    if version(lab):
        execute(
            dsn, f"CREATE EXTENSION {PG_IVM}", f"ALTER DATABASE {PG_IVM} SET session_preload_libraries = '{PG_IVM}'"
        )
        query(dsn, "SELECT pgivm.create_immv('public.wide', %s)", KEYED)
        kept = _write(lab, dsn, orders, UNITS)
        _check(dsn)
    execute(dsn, f"CREATE MATERIALIZED VIEW public.refreshed AS {KEYED}")
    began = time.monotonic()
    execute(dsn, "REFRESH MATERIALIZED VIEW public.refreshed")
    refresh = time.monotonic() - began
    drop_database(lab.target, PG_IVM)
    return Local(plain, kept, refresh)


def version(lab: Lab) -> str | None:
    """Return the version of the extension that the target server offers."""
    available = "SELECT max(default_version) FROM pg_available_extensions WHERE name = %s"
    (found,) = query(lab.target.dsn(), available, PG_IVM)
    return None if found is None else str(found)


def _write(lab: Lab, dsn: str, orders: int, first: int) -> float:
    """Write the units of a backlog; return the seconds that one takes."""
    unit = Unit.of(orders)
    execute(dsn, "VACUUM FULL ANALYZE")
    lab.settle()
    began = time.monotonic()
    for number in range(first, first + UNITS):
        execute(dsn, "; ".join(unit.statements(number, orders)))
    return (time.monotonic() - began) / UNITS


def _check(dsn: str) -> None:
    wide = f"SELECT {COLUMNS} FROM public.wide"
    for one, other in ((KEYED, wide), (wide, KEYED)):
        wrong = query(dsn, f"SELECT count(*) FROM ({one} EXCEPT ALL {other}) AS different")
        check((0,), wrong, f"{PG_IVM}: rows that differ")
