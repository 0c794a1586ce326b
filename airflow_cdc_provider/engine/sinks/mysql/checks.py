"""Checks a MySQL sink without changing anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from airflow_cdc_provider.engine.core.errors import ConfigError, ForeignTable, MissingPrivilege, ServerNotReady
from airflow_cdc_provider.engine.core.findings import Caution, Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.mysql.address import Address
from airflow_cdc_provider.engine.sinks.mysql.obstacles import find_triggers
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted, session
from airflow_cdc_provider.engine.sinks.mysql.settings import MysqlSettings
from airflow_cdc_provider.engine.sinks.mysql.table_definition import columns_of, create_table
from airflow_cdc_provider.engine.sinks.mysql.target_tables import correcting_statement, difference
from airflow_cdc_provider.engine.sinks.mysql.transport import mode_of

_PRIVILEGES = ("SELECT", "INSERT", "UPDATE", "DELETE", "CREATE", "DROP", "ALTER", "INDEX", "TRIGGER")
_TEMPORARY = "CREATE TEMPORARY TABLES"
_PACKET_BYTES = 16 << 20
# Each uses up to 41 bytes of a row in its page, and a row has at most half a page, 8126 bytes.
_LONG_COLUMNS = 195
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_GRANT = re.compile(r"GRANT (.+?) ON (\S+) TO ", re.DOTALL)


def check(settings: MysqlSettings, checks: Checks, pipeline: str, targets: Sequence[Target] | None) -> None:
    """Check the sink, and whether it can have the targets."""
    with ExitStack() as stack:

        def opened() -> Session:
            return stack.enter_context(session(Address.parse(settings.dsn)))

        sink = checks.run("sink", opened, lambda s: f"sink {settings.place} is reachable: {s.version}.")
        if sink is None:
            return
        checks.run("sink connection", partial(_protection, settings))
        checks.run("sink server", partial(_server, sink))
        checks.run("sink durability", partial(_durability, sink))
        checks.run("sink loading", partial(_loading, sink))
        if targets is not None:
            checks.run("sink privileges", partial(_may_write, sink, settings, targets))
            checks.run("sink names", partial(_names, sink, targets))
            checks.run("sink rows", partial(_row_sizes, sink, settings, targets))
            checks.run("sink tables", partial(_definitions, sink, settings, pipeline, targets))
            checks.run("target tables", partial(_target_tables, sink, settings, pipeline, targets))
            checks.run("target code", partial(_triggers, sink, targets))
            if settings.views and checks.passed("sink privileges", "target tables"):
                from airflow_cdc_provider.engine.sinks.mysql.view_preflight import check_views  # late: needs sqlglot

                check_views(checks, sink, settings.views, pipeline, targets)


def _protection(settings: MysqlSettings) -> str:
    address = Address.parse(settings.dsn)
    mode = mode_of(address.options)
    if "unix_socket" in address.options:
        return "Connections to the sink do not leave this machine."
    if mode == "disabled" and address.host not in _LOOPBACK:
        raise Caution(f"Connections to {address.place} are not encrypted because the DSN sets ssl_mode=disabled.")
    if mode == "required":
        raise Caution(
            f"Connections to {address.place} are encrypted, but the server is not verified. Add ssl_ca to the DSN, the"
            " authority that has signed the server's certificate."
        )
    return f"Connections to the sink: ssl_mode {mode}."


def _server(sink: Session) -> str:
    engines = {str(row[0]).lower(): str(row[1]).upper() for row in sink.rows("SHOW ENGINES")}
    if engines.get("innodb", "NO") == "NO":
        raise ServerNotReady("the sink's server has no InnoDB, which transactions require", "Enable InnoDB.")
    (read_only,) = sink.one("SELECT @@read_only")
    if read_only:
        raise ServerNotReady("the sink's server is read-only", "Give sink.dsn the primary's address.")
    return "The sink's server supports transactions and accepts writes."


def _durability(sink: Session) -> str:
    (flush,) = sink.one("SELECT @@innodb_flush_log_at_trx_commit")
    if int(flush) != 1:
        raise Caution(
            f"In the sink innodb_flush_log_at_trx_commit is {flush}: a crash of its machine may undo committed changes"
            " after the source's slot has advanced past them. Set it to 1."
        )
    return "Commits in the sink are durable."


def _loading(sink: Session) -> str:
    local, packet = sink.one("SELECT @@local_infile, @@max_allowed_packet")
    cautions = []
    if not local:
        cautions.append("local_infile is off, so rows are written by INSERT, which is slower")
    if int(packet) < _PACKET_BYTES:
        cautions.append(f"max_allowed_packet is {packet} bytes, so larger values are refused")
    if cautions:
        raise Caution(f"In the sink, {' and '.join(cautions)}.")
    return f"Rows are loaded by LOAD DATA; values may have up to {packet} bytes."


def _may_write(sink: Session, settings: MysqlSettings, targets: Sequence[Target]) -> str:
    """Check the privileges in the user's grants, including those by roles and patterns if they are shown."""
    schemas = {"airflow_cdc", *(target.schema for target in targets), *(view.schema for view in settings.views)}
    wanted: dict[str, tuple[str, ...]] = dict.fromkeys(sorted(schemas), _PRIVILEGES)
    if settings.views:
        wanted["airflow_cdc"] = (*_PRIVILEGES, _TEMPORARY)
    held: dict[str, set[str]] = {}
    for (line,) in sink.rows("SHOW GRANTS"):
        found = _GRANT.match(str(line))
        if found:
            place = found[2].replace("`", "").replace("\\_", "_")
            held.setdefault(place, set()).update(each.strip() for each in found[1].split(","))

    def covers(schema: str) -> bool:
        granted: set[str] = set()
        for place, privileges in held.items():
            pattern = re.escape(place.removesuffix(".*")).replace("%", ".*") if place != "*.*" else ".*"
            if place.endswith(".*") and re.fullmatch(pattern, schema):
                granted |= privileges
        return "ALL PRIVILEGES" in granted or granted >= set(wanted[schema])

    lacking = [schema for schema in wanted if not covers(schema)]
    if lacking:
        (user,) = sink.one("SELECT CURRENT_USER()")
        account = "@".join(f"'{part}'" for part in str(user).rsplit("@", 1))
        grants = [f"GRANT {', '.join(wanted[schema])} ON {quoted(schema)}.* TO {account};" for schema in lacking]
        raise MissingPrivilege(
            f"user {user} lacks privileges in the sink on databases {', '.join(lacking)}", f"Run: {' '.join(grants)}"
        )
    return "Databases and tables can be created and written in the sink."


def _names(sink: Session, targets: Sequence[Target]) -> str:
    (folded,) = sink.one("SELECT @@lower_case_table_names")
    fold: Callable[[str], str] = str.lower if int(folded) else str
    seen: dict[tuple[str, str], str] = {}
    for target in targets:
        place = (fold(target.schema), fold(target.name))
        if place in seen:
            raise ConfigError(
                f"{seen[place]} and {target.table.label} have the same target table"
                f" {target.schema}.{target.name} on a server that ignores the case of names",
                "Choose a sink.schema that gives them different databases, or do not capture one of them.",
            )
        if place[0] in ("airflow_cdc", "mysql", "sys", "information_schema", "performance_schema"):
            raise ConfigError(
                f"{target.table.label} would be copied into {target.schema}, a database of the server or of the engine",
                "Choose another name in sink.schema.",
            )
        seen[place] = target.table.label
    return "Target tables have distinct names."


def _row_sizes(sink: Session, settings: MysqlSettings, targets: Sequence[Target]) -> str:
    wide = []
    for target in targets:
        kinds = columns_of(target.table, settings.mode, sink.collation).values()
        count = sum(kind.startswith("LONG") for kind in kinds)
        if count >= _LONG_COLUMNS:
            wide.append(f"{target.table.label} ({count} such columns)")
    if wide:
        raise Caution(
            f"A row with a short value in each of {_LONG_COLUMNS} or more columns of LONGTEXT and LONGBLOB may be"
            f" larger than InnoDB allows, and would be refused: {', '.join(wide)}."
        )
    return "No target table has too many columns of text for a row."


def _definitions(sink: Session, settings: MysqlSettings, pipeline: str, targets: Sequence[Target]) -> str:
    statements = [create_table(target, settings.mode, sink.collation, pipeline) for target in targets]
    return "\n".join(["Missing target tables are created like this:", *(f"{each};" for each in statements)])


def _triggers(sink: Session, targets: Sequence[Target]) -> str:
    found = find_triggers(sink, targets)
    if found:
        raise Caution(
            "Triggers of target tables change the written rows, and a trigger that fails stops the pipeline:"
            f" {'; '.join(found)}."
        )
    return "No target table has a trigger."


def _target_tables(sink: Session, settings: MysqlSettings, pipeline: str, targets: Sequence[Target]) -> str:
    recorded: dict[tuple[str, str], tuple[str, str]] = {}
    if sink.exists("airflow_cdc", "tables"):
        query = "SELECT target_schema, target_table, pipeline, source_table FROM airflow_cdc.tables"
        recorded = {(schema, name): (owner, table) for schema, name, owner, table in sink.rows(query)}
    for target in targets:
        shown, owner = f"{target.schema}.{target.name}", recorded.get((target.schema, target.name))
        if owner == (pipeline, target.table.label):
            continue
        if owner is not None:
            raise ForeignTable(
                f"the target table {shown} belongs to pipeline {owner[0]!r}, which copies {owner[1]} into it",
                "Give the pipeline another target database (sink.schema), or drop the other one.",
            )
        there = sink.exists(target.schema, target.name)
        if there and sink.rows(f"SELECT 1 FROM {quoted(target.schema, target.name)} LIMIT 1"):
            raise ForeignTable(
                f"the target table {shown} exists and has rows that pipeline {pipeline!r} did not write",
                "Empty or drop the table, or give the pipeline another target database (sink.schema).",
            )
        different = difference(sink, target, settings.mode) if there else ""
        if different:
            raise ForeignTable(
                f"the target table {shown} exists, but does not have the required form ({different})",
                "Drop the table, so that it is created, or change it to the definition shown above:"
                f" {correcting_statement(sink, target, settings.mode) or 'in full'}",
            )
    return "Existing target tables have no foreign rows, and have the required form."
