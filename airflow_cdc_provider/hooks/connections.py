"""Airflow's connections to the servers of a pipeline: found, checked, and as libpq URIs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section_values import connection_uri

if TYPE_CHECKING:
    from airflow.sdk import Connection

POSTGRES_TYPES = ("postgres_cdc", "postgres")

# Fields of the connection itself, and a mode that ordinary sessions must not use.
_NOT_FROM_EXTRA = {"user", "password", "host", "port", "dbname", "replication"}


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
