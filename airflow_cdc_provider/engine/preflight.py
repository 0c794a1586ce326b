"""Everything about a pipeline that can be checked without Spark and without changing anything.

Each check is one sentence, with a remedy when it fails, and the checks go on after a failure wherever the next one
still means something: whoever sets up a source with the help of its administrator wants the whole list at once, not
one refusal a day.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.capture import resolve
from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.connection import connect, describe, row, rows, scalar
from airflow_cdc_provider.engine.errors import (
    CdcError,
    ConfigError,
    ConnectionFailed,
    ForeignTable,
    GateClosed,
    MissingPrivilege,
    ServerNotReady,
    SinkIsSource,
    StateUnwritable,
)
from airflow_cdc_provider.engine.locks import naming_holders
from airflow_cdc_provider.engine.privileges import (
    RECORDS_SCHEMA,
    SINK_FUNCTIONS,
    SOURCE_FUNCTIONS,
    leaves_where,
    may_execute,
    may_read,
    may_replicate,
    may_select,
    may_write,
    quoted_user,
    sees_all_rows,
    takes_writes,
)
from airflow_cdc_provider.engine.publication import publication_sql, published_otherwise
from airflow_cdc_provider.engine.sinks.postgres_definition import CHANGELOG_COLUMNS

T = TypeVar("T")

MINIMUM_VERSION = 140000
LONGEST_NAME = 63  # bytes
# Shorter timeouts end the stream at every pause of the network; status goes out every third of it.
SANE_SENDER_TIMEOUT_SECONDS = 5


@dataclass(frozen=True)
class Finding:
    """What one check found.

    :param check: the check's short name.
    :param message: one sentence.
    :param error: why the pipeline cannot run; ``None`` when the check passed or merely warns.
    """

    check: str
    ok: bool
    message: str
    error: CdcError | None = None
    warning: bool = False


class _Warning(Exception):
    """Raised by a check that has something to say but does not stand in the way."""


@dataclass
class _Checks:
    """Runs checks and collects what they find."""

    findings: list[Finding] = field(default_factory=list)

    def run(self, check: str, function: Callable[[], T], describe: Callable[[T], str] = str) -> T | None:
        """Run one check; ``describe`` puts its result into a sentence. ``None`` when it failed."""
        try:
            with naming_holders():
                result = function()
        except _Warning as e:
            self.findings.append(Finding(check, True, str(e), warning=True))
        except CdcError as e:
            self.findings.append(Finding(check, False, f"{e.message}.", e))
        except psycopg2.Error as e:
            broken = ConnectionFailed(f"the check {check} failed: {str(e).strip()}", "Look into the server's log.")
            self.findings.append(Finding(check, False, broken.message, broken))
        else:
            self.findings.append(Finding(check, True, describe(result)))
            return result
        return None

    def passed(self, *checks: str) -> bool:
        """Whether none of some checks has failed, as far as they have been run."""
        return all(finding.ok for finding in self.findings if finding.check in checks)


def preflight(pipeline: Pipeline) -> list[Finding]:
    """Check source, tables, publication, sink and state of a pipeline; changes nothing.

    :returns: the findings in the order of the checks; pass them to :func:`require` to go on only if all is well.
    """
    checks = _Checks()
    with ExitStack() as stack:

        def open_connection(role: str, dsn: str) -> Connection | None:
            def opened() -> Connection:
                return stack.enter_context(closing(connect(dsn, "airflow-cdc preflight")))

            return checks.run(role, opened, lambda _: f"{role} {describe(dsn)} is reachable.")

        source = open_connection("source", pipeline.source.dsn)
        tables: tuple[Table, ...] | None = None
        if source is not None and checks.run("version", partial(_version, source)) is not None:
            for name, check in _SOURCE_CHECKS.items():
                checks.run(name, partial(check, source, pipeline))
            tables = checks.run(
                "tables",
                lambda: resolve(source, pipeline.source.tables, pipeline.sink.mode),
                lambda found: f"Tables that can be captured: {len(found)}.",
            )
            if tables is not None:
                for name, table_check in _TABLE_CHECKS.items():
                    checks.run(name, partial(table_check, source, pipeline, tables))
        sink = open_connection("sink", pipeline.sink.dsn)
        if sink is not None:
            checks.run("sink functions", partial(may_execute, sink, SINK_FUNCTIONS))
        # Who may not ask a server for its identifier has been told so.
        if sink is not None and source is not None and checks.passed("functions", "sink functions"):
            checks.run("identity", partial(_identity, source, sink, pipeline))
        if sink is not None and tables is not None:
            checks.run("targets", partial(_target_names, pipeline, tables))
            checks.run("names", partial(_changelog_names, pipeline, tables))
            targets = [target_name(pipeline, table) for table in tables]
            checks.run("sink privileges", partial(may_write, sink, targets, pipeline.sink.mode))
            checks.run("target tables", partial(_target_tables, sink, pipeline, tables))
    checks.run("state", partial(_state, pipeline.state))
    return checks.findings


def require(findings: Sequence[Finding]) -> None:
    """Raise the error of the first finding that has one.

    :raises CdcError: of the class that fits the finding.
    """
    for finding in findings:
        if finding.error is not None:
            raise finding.error


def target_name(pipeline: Pipeline, table: Table) -> tuple[str, str]:
    """Schema and name of the target of a source table."""
    return pipeline.sink.schema.replace("{schema}", table.schema), table.name


def _version(source: Connection) -> str:
    version = source.info.parameter_status("server_version")
    if source.info.server_version < MINIMUM_VERSION:
        raise ServerNotReady(f"the source is Postgres {version}", "Upgrade it to Postgres 14 or newer.")
    return f"The source is Postgres {version}."


def _primary(source: Connection, pipeline: Pipeline) -> str:
    if scalar(source, "SELECT pg_catalog.pg_is_in_recovery()"):
        raise ServerNotReady("the source is a standby", "Give source.dsn the primary's address.")
    return "The source is a primary."


def _wal_level(source: Connection, pipeline: Pipeline) -> str:
    level = scalar(source, "SELECT pg_catalog.current_setting('wal_level')")
    if level != "logical":
        raise ServerNotReady(
            f"wal_level of the source is {level}, not logical",
            "Run: ALTER SYSTEM SET wal_level = 'logical'; and restart the server "
            "(on Amazon RDS set rds.logical_replication = 1 and reboot).",
        )
    return "wal_level is logical."


def _slot(source: Connection, pipeline: Pipeline) -> str:
    slot = pipeline.source.slot
    found = rows(
        source,
        "SELECT plugin IS NOT DISTINCT FROM 'pgoutput' AND database = pg_catalog.current_database()"
        " FROM pg_catalog.pg_replication_slots WHERE slot_name = %s",
        [slot],
    )
    if found == [(False,)]:
        raise GateClosed(
            f"replication slot {slot!r} is not ours: it is not for pgoutput in this database",
            "Give the pipeline another slot name (`source.slot`).",
        )
    used, limit = row(
        source,
        "SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots),"
        " pg_catalog.current_setting('max_replication_slots')::int",
    )
    if not found and used >= limit:
        raise ServerNotReady(
            f"no replication slot is free: {used} of max_replication_slots = {limit} are in use",
            "Drop a slot that nobody reads, or raise max_replication_slots and restart the server.",
        )
    return f"Slot {slot!r} exists." if found else f"A replication slot is free ({used} of {limit} are in use)."


def _sender(source: Connection, pipeline: Pipeline) -> str:
    used, limit, is_ours = row(
        source,
        "SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication),"
        " pg_catalog.current_setting('max_wal_senders')::int,"
        " EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = %s AND active)",
        [pipeline.source.slot],
    )
    if used >= limit and not is_ours:
        raise ServerNotReady(
            f"no WAL sender is free: {used} of max_wal_senders = {limit} are in use",
            "Raise max_wal_senders and restart the server.",
        )
    return f"{used} of {limit} WAL senders are in use."


def _retention(source: Connection, pipeline: Pipeline) -> str:
    limit = scalar(source, "SELECT pg_catalog.current_setting('max_slot_wal_keep_size')")
    if limit == "-1":
        raise _Warning(
            "max_slot_wal_keep_size is -1: while the pipeline stands still, its slot keeps WAL until the source's "
            "disk is full; watch the slot, or set a limit (beyond which the pipeline has to read all tables again)."
        )
    return f"A slot keeps at most {limit} of WAL; a pipeline that falls further behind has to read all tables again."


def _sender_timeout(source: Connection, pipeline: Pipeline) -> str:
    shown, seconds = row(
        source,
        "SELECT pg_catalog.current_setting('wal_sender_timeout'),"
        " setting::int8 / 1000.0 FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'",
    )
    if seconds == 0:
        raise _Warning("wal_sender_timeout is 0: a broken connection holds the slot for ever; 60s is usual.")
    if seconds < SANE_SENDER_TIMEOUT_SECONDS:
        raise _Warning(f"wal_sender_timeout is {shown}: short pauses will end the stream; 60s is usual.")
    return f"wal_sender_timeout is {shown}."


def _encoding(source: Connection, pipeline: Pipeline) -> str:
    encoding = scalar(source, "SELECT pg_catalog.getdatabaseencoding()")
    if encoding in ("SQL_ASCII", "MULE_INTERNAL"):
        raise ServerNotReady(
            f"the source database has encoding {encoding}, from which there is no sure way to UTF-8",
            "Move the data to a database with encoding UTF8.",
        )
    return f"The source database has encoding {encoding}."


def _publication(source: Connection, pipeline: Pipeline, tables: Sequence[Table]) -> str:
    """As :func:`check_publication`, before the record has been read, which tells what is captured already."""
    query = "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
    settled = () if rows(source, query, [pipeline.source.slot]) else tables
    return check_publication(source, pipeline, tables, settled)


def check_publication(source: Connection, pipeline: Pipeline, tables: Sequence[Table], settled: Sequence[Table]) -> str:
    """Check that the publication can be made, or is there and publishes what is captured.

    :param settled: those of the tables, with those of their leaves, that the role does not publish anew.
    """
    name = pipeline.source.publication
    quoted = sql.Identifier(name).as_string(source)
    statement = publication_sql(source, name, tables)
    not_owned = leaves_where(source, tables, "NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')")
    found = rows(
        source,
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AND NOT pubviaroot,"
        " pg_catalog.pg_has_role(pubowner, 'USAGE') FROM pg_catalog.pg_publication WHERE pubname = %s",
        [name],
    )
    if not found:
        user, absent = quoted_user(source), f"publication {name!r} does not exist"
        if not_owned:
            raise MissingPrivilege(
                f"{absent}, and role {user} cannot create it because it does not own {', '.join(not_owned)}",
                f"Let the tables' owner, with CREATE on the database, or a superuser run: {statement}",
            )
        database, create = row(
            source,
            "SELECT pg_catalog.quote_ident(d), pg_catalog.has_database_privilege(d, 'CREATE')"
            " FROM pg_catalog.current_database() AS d",
        )
        if not create:
            raise MissingPrivilege(
                f"{absent}, and role {user} cannot create it because it lacks CREATE on the database",
                f"Run: GRANT CREATE ON DATABASE {database} TO {user};",
            )
        takes_writes(source)
        return f"Publication {name!r} can be created."
    complete, is_ours = found[0]
    if not complete:
        raise ServerNotReady(
            f"publication {name!r} does not publish all operations, or publishes partitions as their root",
            f"Run: ALTER PUBLICATION {quoted} SET (publish = 'insert, update, delete, truncate', "
            "publish_via_partition_root = false);",
        )
    missing, different = published_otherwise(source, name, tables)
    fixed = published_otherwise(source, name, settled)[1]
    if fixed or ((missing or different) and (not_owned or not is_ours)):
        shown = ", ".join(f"{leaf.schema}.{leaf.name}" for leaf in different or missing)
        what = "publishes other columns or rows of" if different else "lacks"
        body = statement.partition(" FOR ")[2].rpartition(" WITH ")[0]
        raise MissingPrivilege(
            f"publication {name!r} {what} {shown}", f"Let its owner run: ALTER PUBLICATION {quoted} SET {body};"
        )
    if missing or different:
        takes_writes(source)
        return f"Publication {name!r} exists, tables will be added to it."
    return f"Publication {name!r} exists and has all tables."


def _identity(source: Connection, sink: Connection, pipeline: Pipeline) -> str:
    query = "SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system())::text, pg_catalog.current_database()"
    if row(source, query) == row(sink, query):
        raise SinkIsSource(
            f"source and sink are the same database, {describe(pipeline.sink.dsn)}", "Give sink.dsn another database."
        )
    return "Source and sink are different databases."


def _target_names(pipeline: Pipeline, tables: Sequence[Table]) -> str:
    counts = Counter(target_name(pipeline, table) for table in tables)
    for (schema, name), count in counts.items():
        if count > 1:
            raise ConfigError(
                f"sink.schema: {count} source tables would share the target {schema}.{name}",
                "Use {schema} in sink.schema, or capture one of them in another pipeline.",
            )
        if len(schema.encode()) > LONGEST_NAME:
            raise ConfigError(
                f"sink.schema: {schema} has {len(schema.encode())} bytes, of which Postgres would cut all after the"
                f" {LONGEST_NAME}th",
                "Give sink.schema a shorter text.",
            )
    return "Every table has a target of its own."


def _changelog_names(pipeline: Pipeline, tables: Sequence[Table]) -> str:
    for table in tables if pipeline.sink.mode == "changelog" else ():
        if taken := sorted(CHANGELOG_COLUMNS.keys() & {column.name for column in table.columns}):
            raise ConfigError(
                f"source.tables: {table.label} has columns of the names {', '.join(taken)}, which the changelog gives"
                " columns of its own",
                "Leave them out with `columns`, rename them at the source, or use sink.mode: mirror.",
            )
    return "No column has a name that the changelog needs."


def _target_tables(sink: Connection, pipeline: Pipeline, tables: Sequence[Table]) -> str:
    recorded: dict[tuple[str, str], tuple[str, str]] = {}
    if may_select(sink, (RECORDS_SCHEMA, "tables")):
        query = f"SELECT target_schema, target_table, pipeline, source_table FROM {RECORDS_SCHEMA}.tables"
        recorded = {(schema, name): (owner, table) for schema, name, owner, table in rows(sink, query)}
    for table in tables:
        schema, name = target_name(pipeline, table)
        owner = recorded.get((schema, name))
        if owner == (pipeline.name, table.label):
            continue
        target = sql.Identifier(schema, name)
        advice = "Empty or drop the table, or give the pipeline another target schema (sink.schema)."
        if owner is not None:
            raise ForeignTable(
                f"the target table {schema}.{name} belongs to pipeline {owner[0]!r}, which copies {owner[1]} into it",
                "Give the pipeline another target schema (sink.schema), or drop the other one.",
            )
        if may_select(sink, (schema, name)) and rows(sink, sql.SQL("SELECT 1 FROM {} LIMIT 1").format(target)):
            raise ForeignTable(
                f"the target table {schema}.{name} exists and has rows that pipeline {pipeline.name!r} did not write",
                advice,
            )
    return "No target table has rows of others."


def _state(url: str) -> str:
    """Check that the state directory can be made or written, without making it."""
    advice = "Give `state` a location that this machine and Spark's driver can write."
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            while not os.path.lexists(folder):
                folder = folder.parent
            # A file without a name: the only sure test, since root passes every look at permissions.
            with tempfile.TemporaryFile(dir=folder):
                pass
        else:
            _list_nearest(url)
    except Exception as e:  # object stores raise classes of their own
        raise StateUnwritable(f"state {url} cannot be written: {e}", advice) from e
    return f"State {url} can be written."


def _list_nearest(url: str) -> None:
    """List the nearest folder that exists, at the latest the root or bucket.

    :raises FileNotFoundError: when not even that exists.
    """
    system, path = fsspec.url_to_fs(url)
    while True:
        try:
            system.ls(path, detail=False)
            return
        except FileNotFoundError:
            parent = system._parent(path)
            if parent == path or not parent:  # a bucket has no parent
                raise
            path = parent


_SOURCE_CHECKS: dict[str, Callable[[Connection, Pipeline], str]] = {
    "primary": _primary,
    "wal_level": _wal_level,
    "slot": _slot,
    "wal sender": _sender,
    # After it, since this takes a sender for a moment.
    "replication": lambda source, pipeline: may_replicate(source, pipeline.source.dsn),
    "functions": lambda source, pipeline: may_execute(source, SOURCE_FUNCTIONS),
    "wal retention": _retention,
    "wal_sender_timeout": _sender_timeout,
    "encoding": _encoding,
}
_TABLE_CHECKS: dict[str, Callable[[Connection, Pipeline, Sequence[Table]], str]] = {
    "select": lambda source, pipeline, tables: may_read(source, tables),
    "row security": lambda source, pipeline, tables: sees_all_rows(source, tables),
    "publication": _publication,
}
