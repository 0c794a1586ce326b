"""The connection type ``postgres_cdc``: a Postgres server that is the source or the target of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError
from airflow_cdc_provider.engine.core.section_values import connection_uri
from airflow_cdc_provider.engine.sources.postgres.settings import PostgresSourceSettings

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_cdc_provider.engine.core.findings import Finding

POSTGRES_TYPES = ("postgres_cdc", "postgres")

# Fields of the connection itself, and a mode that ordinary sessions must not use.
_NOT_FROM_EXTRA = {"user", "password", "host", "port", "dbname", "replication"}


class PostgresCdcHook(BaseHook):
    """A Postgres server that changes are captured from, or copied into.

    :param postgres_cdc_conn_id: a connection of type ``postgres_cdc`` or ``postgres``.
    """

    conn_name_attr = "postgres_cdc_conn_id"
    default_conn_name = "postgres_cdc_default"
    conn_type = "postgres_cdc"
    hook_name = "Postgres CDC"

    def __init__(self, postgres_cdc_conn_id: str = default_conn_name, logger_name: str | None = None) -> None:
        super().__init__(logger_name=logger_name)
        self.postgres_cdc_conn_id = postgres_cdc_conn_id

    def get_uri(self) -> str:
        """Return the connection as a libpq URI.

        :raises ConfigError: if the connection does not exist, or has another type.
        """
        return postgres_uri(self._connection())

    def get_conn(self) -> Any:
        """Open an autocommit connection with the session settings of the engine."""
        from airflow_cdc_provider.engine.postgres.connection import connect

        return connect(self.get_uri(), settings={"lock_timeout": "0"}, writes=True)

    def test_connection(self) -> tuple[bool, str]:
        """Check whether the server can be used as the extra field ``use`` states, without changing anything.

        ``use`` is ``source`` or ``target``; for a source, the extra fields ``slot`` and ``publication`` name the slot
        and the publication that a pipeline will use.

        :returns: whether all checks passed, and one sentence for each check, failures first.
        """
        try:
            findings = _check(self._connection())
        except CdcError as e:
            return False, f"{sentence(e.message)} {e.solution}"
        by_weight = sorted(findings, key=lambda finding: (finding.ok, not finding.warning))
        return all(finding.ok for finding in findings), " ".join(map(_in_sentences, by_weight))

    def _connection(self) -> Connection:
        connection = find_connection(self.postgres_cdc_conn_id)
        require_type(connection, POSTGRES_TYPES)
        return connection


def _check(connection: Connection) -> list[Finding]:
    from airflow_cdc_provider.engine.sinks.postgres import checks as target
    from airflow_cdc_provider.engine.sources.postgres.provision.readiness import check_server

    extra = connection.extra_dejson
    if extra.get("use") == "target":
        return target.check_server(postgres_uri(connection))
    slot, publication = (extra.get(name) or "" for name in ("slot", "publication"))
    return check_server(PostgresSourceSettings(postgres_uri(connection), (), slot, publication))


def require_type(connection: Connection, types: Sequence[str], wanted_by: str = "") -> None:
    """Refuse a connection that has the wrong type.

    :param types: the accepted types, the recommended one first.
    :param wanted_by: the key or parameter that names the connection, for the message.
    :raises ConfigError: if it has another type.
    """
    if connection.conn_type in types:
        return
    named = f", named by {wanted_by}," if wanted_by else ""
    why = (
        "Airflow's command line stores `generic` for a type that no installed package provides. "
        if connection.conn_type == "generic"
        else ""
    )
    uri = f"{types[0].replace('_', '-')}://user:password@host/database"
    raise ConfigError(
        f"the Airflow connection {connection.conn_id!r}{named} is of type {connection.conn_type!r},"
        f" not {' or '.join(types)}",
        f"{why}Choose another type in Admin > Connections, or run `airflow connections delete {connection.conn_id}`"
        f" and `airflow connections add {connection.conn_id} --conn-uri {uri}`.",
    )


def find_connection(conn_id: str, wanted_by: str = "") -> Connection:
    """Return a connection of Airflow.

    :param wanted_by: the key or parameter that names the connection, for the message.
    :raises ConfigError: if it does not exist.
    """
    try:
        return BaseHook.get_connection(conn_id)
    except AirflowNotFoundException as e:
        named = f", named by {wanted_by}," if wanted_by else ""
        raise ConfigError(
            f"the Airflow connection {conn_id!r}{named} does not exist",
            f"Add it in Admin > Connections, with `airflow connections add {conn_id} ...`, "
            f"or as the variable AIRFLOW_CONN_{conn_id.upper()}.",
        ) from e


def postgres_uri(connection: Connection) -> str:
    """Return a libpq URI without the extras for Airflow's own hooks, which libpq would refuse."""
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()} - _NOT_FROM_EXTRA
    extra = {
        key: str(value) for key, value in connection.extra_dejson.items() if key in known and value not in (None, "")
    }
    host = connection.host or ""
    if host.startswith("/"):  # the directory of a Unix socket cannot be the host of a URI
        host, extra["host"] = "", host
    return connection_uri(
        json.dumps(
            {
                "login": connection.login,
                "password": connection.password,
                "host": host,
                "port": connection.port,
                "schema": connection.schema,
                "extra": extra,
            }
        )
    )


def sentence(message: str) -> str:
    """Return a message with a period, which errors of the engine omit."""
    return message if message.endswith((".", "!", "?")) else f"{message}."


def _in_sentences(finding: Finding) -> str:
    return f"{finding.message} {finding.error.solution}" if finding.error else finding.message
