"""Lets the server check the SELECT of a view, which has the last word on types and functions.

A temporary view of the server shows what the parser has understood: the server must read the columns that the parser
has found, and must print the view's own text and the text that the parser made of it as the same query.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import psycopg2
import sqlglot
from psycopg2 import sql
from sqlglot import exp

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.select_parser import parse_view
from airflow_cdc_provider.engine.views.settings import ViewSettings

_NAME_BYTES = 63
_PROBE = sql.SQL("pg_temp.cdc_probe")
# Functions that the server calls stable although their result depends only on arguments and on settings that every
# session of the engine has.
_SETTLED = (
    *(
        "concat",
        "concat_ws",
        "format",
        "array_to_string",
        "textanycat",
        "anytextcat",
        "to_char",
        "to_number",
        "to_date",
    ),
    *("to_timestamp", "date", "timestamp", "timestamptz", "time", "timetz", "timezone", "date_trunc", "date_part"),
    *("extract", "make_timestamptz", "overlaps", "to_json", "to_jsonb", "row_to_json", "array_to_json"),
    *("json_build_object", "jsonb_build_object", "json_build_array", "jsonb_build_array"),
    *("json_agg_transfn", "jsonb_agg_transfn", "json_agg", "jsonb_agg", "timestamptz_pl_interval"),
    *("timestamptz_mi_interval", "interval_pl_timestamptz", "date_bin", "enum_first", "enum_last", "enum_range"),
)
_UNSETTLED = """
SELECT DISTINCT p.proname::text, CASE WHEN p.proretset THEN 'r' ELSE p.provolatile::text END FROM pg_rewrite r,
LATERAL regexp_matches(r.ev_action::text, ':(?:funcid|opfuncid|aggfnoid|winfnoid) ([0-9]+)', 'g') AS found (parts)
JOIN pg_proc p ON p.oid = found.parts[1]::oid
WHERE r.ev_class = to_regclass('pg_temp.cdc_probe')
  AND (p.proretset OR p.provolatile = 'v' OR p.provolatile = 's' AND NOT (
    p.pronamespace = 'pg_catalog'::regnamespace
    AND (p.proname = ANY (%s) OR p.proname ~ '^(date|timestamp|timestamptz)_(eq|ne|lt|le|gt|ge|cmp)_')))
ORDER BY 1
"""
_MOMENTS = re.compile(r"'\s*(now|today|tomorrow|yesterday)\b[^']*'", re.IGNORECASE)
_SERVER_VALUES = """
SELECT ev_action::text ~ 'SQLVALUEFUNCTION' FROM pg_rewrite WHERE ev_class = to_regclass('pg_temp.cdc_probe')
"""
_READ = """
SELECT c.relname::text, n.nspname::text, a.attname::text
FROM pg_rewrite r
JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
JOIN pg_class c ON c.oid = d.refobjid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE r.ev_class = to_regclass('pg_temp.cdc_probe') AND d.refobjsubid <> 0 AND d.refobjid <> r.ev_class
"""


def checked_view(connection: Connection, settings: ViewSettings, targets: Mapping[str, Target]) -> View:
    """Parse a view, and let the server check it; the targets' tables exist.

    :param targets: the recorded targets by label.
    :raises ConfigError: when it cannot be maintained; says what to write instead.
    """
    view = parse_view(settings, {label: target.table for label, target in targets.items()}, "postgres")
    tables = quoted_tables(connection, targets.values())
    if len(view.name.encode()) > _NAME_BYTES:
        raise ConfigError(
            f"view {view.label}: its name is longer than {_NAME_BYTES} bytes, to which Postgres would truncate it",
            "Give it a shorter name.",
        )
    own = {(target.schema, target.name): label for label, target in targets.items()}
    if (view.schema, view.name) in own:
        raise ConfigError(
            f"view {view.label}: {own[view.schema, view.name]} is copied into a table of this name",
            "Give the view another name.",
        )
    with _refusals(connection, settings):
        meant = _probe(connection, view.select(tables))
        _check_functions(connection, settings)
        _check_moments(settings, meant)
        _check_columns(connection, view, own)
        written = _with_tables(settings.sql, targets, connection)
        if written is not None and meant != _probe(connection, written):
            raise ConfigError(
                f"view {view.label}: its SQL was not understood: it was read as {view.select(tables)}",
                "Write the expression that differs in another way, for example with CAST instead of an operator.",
            )
        rows(connection, sql.SQL("DROP VIEW {}").format(_PROBE))
    return view


def quoted_tables(connection: Connection, targets: Collection[Target]) -> dict[str, str]:
    """Return the target tables by label, as SQL."""
    return {target.table.label: sql.Identifier(target.schema, target.name).as_string(connection) for target in targets}


@contextmanager
def _refusals(connection: Connection, settings: ViewSettings) -> Iterator[None]:
    """Translate the server's refusals; the transaction goes on without what was tried."""
    rows(connection, "SAVEPOINT cdc_probe")
    try:
        yield
    except psycopg2.Error as e:
        rows(connection, "ROLLBACK TO SAVEPOINT cdc_probe")
        reason = e.diag.message_primary or str(e).splitlines()[0]
        hint = f" {e.diag.message_hint}" if e.diag.message_hint else ""
        raise ConfigError(
            f"view {settings.label}: the sink refuses its SQL: {reason}",
            f"Correct the SELECT; functions and types outside of pg_catalog need their schema.{hint}",
        ) from e
    except ConfigError:
        rows(connection, "ROLLBACK TO SAVEPOINT cdc_probe")
        raise
    rows(connection, "RELEASE SAVEPOINT cdc_probe")


def _probe(connection: Connection, select: str) -> str:
    """Create the temporary view; return the query as the server prints it."""
    rows(connection, sql.SQL("DROP VIEW IF EXISTS {}").format(_PROBE))
    rows(connection, sql.SQL("CREATE TEMPORARY VIEW cdc_probe AS {}").format(sql.SQL(select)))
    return str(scalar(connection, "SELECT pg_get_viewdef('pg_temp.cdc_probe'::regclass)"))


def _with_tables(text: str, targets: Mapping[str, Target], connection: Connection) -> str | None:
    """Return a SELECT as the user wrote it, with the target tables in place of the source tables.

    :returns: ``None`` if it has a RIGHT JOIN, which the parser exchanges, so that the server prints another query.
    """
    statement = sqlglot.parse_one(text, read="postgres")
    if any(join.side == "RIGHT" for join in statement.find_all(exp.Join)):
        return None
    by_name: dict[tuple[str, str], str] = {}
    for target in targets.values():
        name = sql.Identifier(target.schema, target.name).as_string(connection)
        by_name[target.table.schema, target.table.name] = by_name["", target.table.name] = name
    for source in sorted(statement.find_all(exp.Table), key=lambda each: -each.this.meta["start"]):
        parts = [part for part in (source.args.get("db"), source.this) if part is not None]
        folded = [part.name if part.quoted else part.name.lower() for part in parts]
        start, end = parts[0].meta["start"], parts[-1].meta["end"] + 1
        alias = "" if source.alias else f" AS {sql.Identifier(folded[-1]).as_string(connection)}"
        name = by_name[folded[0] if len(folded) > 1 else "", folded[-1]]
        text = f"{text[:start]}{name}{alias}{text[end:]}"
    return text.rstrip().removesuffix(";")


def _check_functions(connection: Connection, settings: ViewSettings) -> None:
    for name, volatility in rows(connection, _UNSETTLED, [list(_SETTLED)]):
        if volatility == "r":
            raise ConfigError(
                f"view {settings.label}: {name} is not allowed, because it returns several rows",
                "Compute it where the view is read.",
            )
        kind = "volatile" if volatility == "v" else "only stable"
        raise ConfigError(
            f"view {settings.label}: {name} is not allowed, because it is {kind}: its result may change without a"
            " change of a row",
            "Compute it where the view is read, or use an immutable function.",
        )
    if scalar(connection, _SERVER_VALUES):
        raise ConfigError(
            f"view {settings.label}: it uses the current date, time or user",
            "Compare with it where the view is read.",
        )


def _check_moments(settings: ViewSettings, meant: str) -> None:
    """Refuse literals of times that the server has replaced by their value; it prints texts as they are."""
    for found in _MOMENTS.finditer(settings.sql):
        if found[0] not in meant:
            raise ConfigError(
                f"view {settings.label}: {found[0]} is a moment, which the sink would compute only once",
                "Compare with the current time where the view is read.",
            )


def _check_columns(connection: Connection, view: View, own: Mapping[tuple[str, str], str]) -> None:
    """Refuse a view of which the server reads other columns than the parser has found."""
    for table, schema, column in rows(connection, _READ):
        label = own.get((schema, table))
        if label is None or column not in view.columns.get(label, ()):
            raise ConfigError(
                f"view {view.label}: the sink also reads {schema}.{table}.{column} for it",
                "Name the columns of the captured tables explicitly.",
            )
