"""Checks whether a server is ready to be a source, regardless of the captured tables; needs a connection only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial

from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ConfigError, GateClosed, MissingPrivilege, ServerNotReady
from airflow_cdc_provider.engine.core.findings import Caution, Checks, Finding
from airflow_cdc_provider.engine.postgres.connection import Connection, connect, describe, row, rows, scalar
from airflow_cdc_provider.engine.postgres.driver_checks import convert_driver_errors
from airflow_cdc_provider.engine.postgres.privileges import (
    LOG_FUNCTIONS,
    SLOT_FUNCTIONS,
    SOURCE_FUNCTIONS,
    may_execute,
    may_replicate,
    quoted_user,
    takes_writes,
)
from airflow_cdc_provider.engine.postgres.server_identity import QUERY
from airflow_cdc_provider.engine.sources.postgres.provision.slot_session import slot_session
from airflow_cdc_provider.engine.sources.postgres.settings import PostgresSourceSettings

MINIMUM_VERSION = 140000
# Shorter timeouts end the stream at every pause of the network; status goes out every third of the timeout.
SANE_SENDER_TIMEOUT_SECONDS = 5


def check_server(server: PostgresSourceSettings) -> list[Finding]:
    """Check a source server without changing anything.

    :param server: its slot and publication are checked if they are named (not ``""``); its tables are not.
    """
    checks = Checks(convert_driver_errors)
    opened = checks.run(
        "source",
        lambda: connect(server.dsn, "airflow-cdc preflight"),
        lambda _: f"source {describe(server.dsn)} is reachable.",
    )
    if opened is not None:
        with closing(opened) as source:
            if check_settings(checks, source, server) and server.publication:
                checks.run("publication", partial(_publication, source, server.publication))
    return checks.findings


def check_settings(checks: Checks, source: Connection, server: PostgresSourceSettings) -> bool:
    """Run the checks of version, settings and role; return whether the server's version allows further checks."""
    if checks.run("version", partial(_version, source)) is None:
        return False
    for name, check in _CHECKS.items():
        checks.run(name, partial(check, source, server))
    return True


def _version(source: Connection) -> str:
    version = source.info.parameter_status("server_version")
    if source.info.server_version < MINIMUM_VERSION:
        raise ServerNotReady(f"the source is Postgres {version}", "Upgrade it to Postgres 14 or newer.")
    return f"The source is Postgres {version}."


def _primary(source: Connection, server: PostgresSourceSettings) -> str:
    if scalar(source, "SELECT pg_catalog.pg_is_in_recovery()"):
        raise ServerNotReady("the source is a standby", "Give source.dsn the primary's address.")
    return "The source is a primary."


def _wal_level(source: Connection, server: PostgresSourceSettings) -> str:
    level = scalar(source, "SELECT pg_catalog.current_setting('wal_level')")
    if level != "logical":
        raise ServerNotReady(
            f"wal_level of the source is {level}, not logical",
            "Run: ALTER SYSTEM SET wal_level = 'logical'; and restart the server "
            "(on Amazon RDS set rds.logical_replication = 1 and reboot).",
        )
    return "wal_level is logical."


def _slot(source: Connection, server: PostgresSourceSettings) -> str:
    slot = server.slot
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
            "Drop an unused slot, or raise max_replication_slots and restart the server.",
        )
    return f"Slot {slot!r} exists." if found else f"A replication slot is free ({used} of {limit} are in use)."


def _sender(source: Connection, server: PostgresSourceSettings) -> str:
    used, limit, is_ours = row(
        source,
        "SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication),"
        " pg_catalog.current_setting('max_wal_senders')::int,"
        " EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = %s AND active)",
        [server.slot],
    )
    if used >= limit and not is_ours:
        raise ServerNotReady(
            f"no WAL sender is free: {used} of max_wal_senders = {limit} are in use",
            "Raise max_wal_senders and restart the server.",
        )
    return f"{used} of {limit} WAL senders are in use."


def _replication(source: Connection, server: PostgresSourceSettings) -> str:
    with slot_session(server, source) as session:
        place = f"SELECT {QUERY}"
        if session is not source and row(session, place) != row(source, place):
            raise ConfigError(
                f"source.replication_dsn, {describe(server.log_dsn)}, leads to another server or database than"
                f" source.dsn, {describe(server.dsn)}",
                "Let both name the same database of the same server; only the roles differ.",
            )
        return may_replicate(session, server.log_dsn)


def _functions(source: Connection, server: PostgresSourceSettings) -> str:
    if not server.replication_dsn:
        return may_execute(source, SOURCE_FUNCTIONS + SLOT_FUNCTIONS)
    with slot_session(server, source) as session:
        may_execute(session, LOG_FUNCTIONS + SLOT_FUNCTIONS)
    return may_execute(source, SOURCE_FUNCTIONS)


def _retention(source: Connection, server: PostgresSourceSettings) -> str:
    limit = scalar(source, "SELECT pg_catalog.current_setting('max_slot_wal_keep_size')")
    if limit == "-1":
        raise Caution(
            "max_slot_wal_keep_size is -1: while the pipeline stands still, its slot keeps WAL until the source's "
            "disk is full; watch the slot, or set a limit (beyond which the pipeline has to read all tables again)."
        )
    return f"A slot keeps at most {limit} of WAL; a pipeline that falls further behind has to read all tables again."


def _sender_timeout(source: Connection, server: PostgresSourceSettings) -> str:
    shown, seconds = row(
        source,
        "SELECT pg_catalog.current_setting('wal_sender_timeout'),"
        " setting::int8 / 1000.0 FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'",
    )
    if seconds == 0:
        raise Caution("wal_sender_timeout is 0: a broken connection holds the slot forever; 60s is usual.")
    if seconds < SANE_SENDER_TIMEOUT_SECONDS:
        raise Caution(f"wal_sender_timeout is {shown}: short pauses will end the stream; 60s is usual.")
    return f"wal_sender_timeout is {shown}."


def _encoding(source: Connection, server: PostgresSourceSettings) -> str:
    encoding = scalar(source, "SELECT pg_catalog.getdatabaseencoding()")
    if encoding in ("SQL_ASCII", "MULE_INTERNAL"):
        raise ServerNotReady(
            f"the source database has encoding {encoding}, which cannot be converted to UTF-8 reliably",
            "Move the data to a database with encoding UTF8.",
        )
    return f"The source database has encoding {encoding}."


def _slot_timeout(source: Connection, server: PostgresSourceSettings) -> str:
    shown = scalar(source, "SELECT pg_catalog.current_setting('idle_replication_slot_timeout', true)")
    if shown not in (None, "0"):
        raise Caution(
            f"idle_replication_slot_timeout is {shown}: a pipeline that stands still for longer loses its slot, and has"
            " to read all tables again."
        )
    return "An idle slot is kept."


def _standbys(source: Connection, server: PostgresSourceSettings) -> str:
    names, may_look, synchronous = row(
        source,
        "SELECT pg_catalog.current_setting('synchronous_standby_names'),"
        " pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'),"
        " pg_catalog.count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')) FROM pg_catalog.pg_stat_replication",
    )
    if not names:
        return "Commits wait for no standby."
    if may_look and not synchronous:
        raise Caution(
            f"no standby of synchronous_standby_names = {names} is connected: commits wait, and so would the slot that"
            " is to be made."
        )
    return f"Commits wait for standbys: synchronous_standby_names is {names}."


def _publication(source: Connection, name: str) -> str:
    if find_publication(source, name) is None:
        return may_create_publication(source, name)
    return f"Publication {name!r} exists and publishes all operations."


def find_publication(source: Connection, name: str) -> bool | None:
    """Return whether the role owns a publication; ``None`` when there is none of that name.

    :raises ServerNotReady: when it does not publish what a pipeline needs.
    """
    found = rows(
        source,
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AND NOT pubviaroot,"
        " pg_catalog.pg_has_role(pubowner, 'USAGE') FROM pg_catalog.pg_publication WHERE pubname = %s",
        [name],
    )
    if not found:
        return None
    complete, is_ours = found[0]
    if not complete:
        raise ServerNotReady(
            f"publication {name!r} does not publish all operations, or publishes partitions as their root",
            f"Run: ALTER PUBLICATION {sql.Identifier(name).as_string(source)}"
            " SET (publish = 'insert, update, delete, truncate', publish_via_partition_root = false);",
        )
    return bool(is_ours)


def may_create_publication(source: Connection, name: str) -> str:
    """Check that the role may create a publication of tables that it owns."""
    database, create = row(
        source,
        "SELECT pg_catalog.quote_ident(d), pg_catalog.has_database_privilege(d, 'CREATE')"
        " FROM pg_catalog.current_database() AS d",
    )
    if not create:
        user = quoted_user(source)
        raise MissingPrivilege(
            f"publication {name!r} does not exist, and role {user} cannot create it because it lacks CREATE on the"
            " database",
            f"Run: GRANT CREATE ON DATABASE {database} TO {user};",
        )
    takes_writes(source)
    return f"Publication {name!r} can be created."


_CHECKS: dict[str, Callable[[Connection, PostgresSourceSettings], str]] = {
    "primary": _primary,
    "wal_level": _wal_level,
    "slot": _slot,
    "wal sender": _sender,
    # After "wal sender", since this one takes a WAL sender for a moment.
    "replication": _replication,
    "functions": _functions,
    "wal retention": _retention,
    "wal_sender_timeout": _sender_timeout,
    "idle slots": _slot_timeout,
    "standbys": _standbys,
    "encoding": _encoding,
}
