"""Lets the server check the SELECT of a view, which has the last word on types and functions.

The server evaluates the SELECT without rows, under a mode that refuses columns without a definite value in a group. It
must also print the view's own text and the text that the parser made of it as the same query.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import sqlglot
from sqlglot import exp

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.mysql.address import driver
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import is_retryable, server_message
from airflow_cdc_provider.engine.sinks.mysql.view_definition import ViewColumn, probed, quoted_tables
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.dialects import CommonMysql
from airflow_cdc_provider.engine.views.select_parser import parse_view
from airflow_cdc_provider.engine.views.settings import ViewSettings

_LONGEST_NAME = 64
_PRINTED = 1003  # number of the note with the query
# The parser writes the second form in place of the first.
_SAME = {
    r"\bifnull\(": "coalesce(",
    r"\blog\(": "ln(",
    r"\binterval '(\d+)'": r"interval \1",
    r"\bDATE('[^']*')": r"cast(\1 as date)",
    r"\bTIMESTAMP('[^']*')": r"cast(\1 as datetime)",
}
_OTHERS = ("airflow_cdc", "mysql", "sys", "information_schema", "performance_schema")


def checked_view(session: Session, settings: ViewSettings, targets: Mapping[str, Target]) -> View:
    """Parse a view, and let the server check it; the targets' tables exist. This does not end a transaction.

    :param targets: the recorded targets by label.
    :raises ConfigError: when it cannot be maintained; says what to write instead.
    """
    view = parse_view(settings, {label: target.table for label, target in targets.items()}, "mysql")
    check_parsed(session, settings, view, targets)
    with _refusals(session, settings), probed(session, view.select(quoted_tables(targets))) as columns:
        _check_types(view, columns)
        _check_meaning(session, settings, targets)
    return view


def check_parsed(session: Session, settings: ViewSettings, view: View, targets: Mapping[str, Target]) -> None:
    """Check what can be checked of a parsed view without its tables.

    :raises ConfigError: as :func:`checked_view`.
    """
    _check_name(view, targets)
    _check_functions(session, settings)


def _check_name(view: View, targets: Mapping[str, Target]) -> None:
    own = {(target.schema, target.name): label for label, target in targets.items()}
    if (view.schema, view.name) in own:
        raise ConfigError(
            f"view {view.label}: {own[view.schema, view.name]} is copied into a table of this name",
            "Give the view another name.",
        )
    if view.schema.lower() in _OTHERS:
        raise ConfigError(
            f"view {view.label}: {view.schema} is a database of the server or of the engine",
            "Give the view a name in another database.",
        )
    names = [view.schema, view.name, *(output.name for output in view.outputs)]
    odd = [name for name in names if name != name.rstrip() or len(name) > _LONGEST_NAME]
    if odd:
        raise ConfigError(f"view {view.label}: MySQL does not allow a name like {odd[0]!r}", "Choose another name.")


@contextmanager
def _refusals(session: Session, settings: ViewSettings) -> Iterator[None]:
    """Translate the server's refusals."""
    pymysql = driver()
    (mode,) = session.one("SELECT @@sql_mode")
    session.run("SET SESSION sql_mode = CONCAT(@@sql_mode, ',ONLY_FULL_GROUP_BY')")
    try:
        yield
    except pymysql.MySQLError as e:
        if is_retryable(e):
            raise
        raise ConfigError(
            f"view {settings.label}: the sink refuses its SQL: {server_message(e)}",
            "Correct the SELECT; functions outside of the server's own need their database.",
        ) from e
    finally:
        session.run("SET SESSION sql_mode = %s", [mode])


def _check_functions(session: Session, settings: ViewSettings) -> None:
    """Refuse stored functions whose result may depend on more than their arguments."""
    for call in sqlglot.parse_one(settings.sql, read="mysql").find_all(exp.Dot):
        schema, name = call.this.name, call.expression.name
        found = session.rows(
            "SELECT is_deterministic, sql_data_access FROM information_schema.routines"
            " WHERE routine_type = 'FUNCTION' AND routine_schema = %s AND routine_name = %s",
            [schema, name],
        )
        for deterministic, access in found:
            if str(deterministic) != "YES" or str(access) in ("READS SQL DATA", "MODIFIES SQL DATA"):
                raise ConfigError(
                    f"view {settings.label}: {schema}.{name} is not allowed, because its result may change without a"
                    " change of a row: it is not DETERMINISTIC, or reads tables",
                    "Compute it where the view is read, or declare the function as DETERMINISTIC and NO SQL.",
                )


def _check_meaning(session: Session, settings: ViewSettings, targets: Mapping[str, Target]) -> None:
    """Refuse a SELECT that the parser understands otherwise than the server."""
    text = _with_tables(settings.sql, targets)
    read = sqlglot.parse_one(text, read="mysql").sql(CommonMysql, identify=True, comments=False)
    if _printed(session, text) != _printed(session, read):
        raise ConfigError(
            f"view {settings.label}: its SQL was not understood: it was read as {read}",
            "Write the expression that differs in another way, for example with CAST instead of an operator.",
        )


def _printed(session: Session, select: str) -> str:
    """Return a query as the server prints it, with one of several forms that mean the same."""
    session.rows(f"EXPLAIN {'EXTENDED' if session.mariadb else 'FORMAT=TRADITIONAL'} {select}")
    printed = next(str(message) for _, code, message in session.rows("SHOW WARNINGS") if int(code) == _PRINTED)
    for form, same in _SAME.items():
        printed = re.sub(form, same, printed)
    return printed


def _with_tables(text: str, targets: Mapping[str, Target]) -> str:
    """Return a SELECT as the user wrote it, with the target tables in place of the source tables."""
    by_name: dict[tuple[str, str], str] = {}
    for label, name in quoted_tables(targets).items():
        schema, table = targets[label].table.schema, targets[label].table.name
        by_name[schema, table] = by_name["", table] = name
    sources = sqlglot.parse_one(text, read="mysql").find_all(exp.Table)
    for source in sorted(sources, key=lambda each: -int(each.this.meta["start"])):
        parts = [part for part in (source.args.get("db"), source.this) if part is not None]
        start, end = parts[0].meta["start"], parts[-1].meta["end"] + 1
        alias = "" if source.alias else f" AS {quoted(source.name)}"
        text = f"{text[:start]}{by_name[source.db, source.name]}{alias}{text[end:]}"
    return text.rstrip().removesuffix(";")


def _check_types(view: View, columns: list[ViewColumn]) -> None:
    """Refuse columns whose values cannot be compared exactly."""
    for column in columns:
        if column.type.startswith("float"):
            raise ConfigError(
                f"view {view.label}: its column {column.name} is a FLOAT, which the server shows with six digits",
                "Use CAST(… AS DOUBLE).",
            )
