"""What the Airflow shells share: connections, pipelines, and failures in Airflow's terms.

A pipeline file may name Airflow connections. Only Airflow can resolve them, and
only the worker talks to Airflow, so the file is read here with each connection
as a variable ``AIRFLOW_CONN_<ID>``, and the same variables go to the Spark driver,
which reads the file again without Airflow.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowNotFoundException

from airflow_cdc_provider.engine.config import Pipeline, connection_uri
from airflow_cdc_provider.engine.errors import CdcError, ConfigError, Retry

if TYPE_CHECKING:
    from airflow.sdk import Connection

POSTGRES_TYPES = ("postgres", "postgres_cdc")

_VARIABLE = re.compile(r"\$\{(\w+)\}")
# Fields of the connection itself, and a mode that ordinary sessions must not be in.
_NOT_FROM_EXTRA = {"user", "password", "host", "port", "dbname", "replication"}

_READINESS = """
    SELECT current_setting('server_version'), current_setting('server_version_num')::int / 10000,
           current_setting('wal_level'), current_user::text,
           current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_replication_slots),
           current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_stat_replication)
"""


class PostgresCdcHook(BaseHook):
    """A Postgres server that changes are captured from.

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
        """The connection as a libpq URI.

        :raises ConfigError: when the connection does not exist or is of another type.
        """
        connection = find_connection(self.postgres_cdc_conn_id)
        if connection.conn_type not in POSTGRES_TYPES:
            raise ConfigError(
                f"the connection {self.postgres_cdc_conn_id!r} is of type {connection.conn_type!r}",
                f"Name a connection of type {' or '.join(POSTGRES_TYPES)}.",
            )
        return _libpq_uri(connection)

    def get_conn(self) -> Any:
        """An autocommitting connection with the session settings of the engine."""
        from airflow_cdc_provider.engine.connection import connect

        return connect(self.get_uri(), settings={"lock_timeout": "0"})

    def test_connection(self) -> tuple[bool, str]:
        """Whether changes can be captured through this connection, and a sentence a check."""
        from airflow_cdc_provider.engine.connection import connected, describe, row
        from airflow_cdc_provider.engine.privileges import may_replicate

        refusal = ""
        try:
            uri = self.get_uri()
            with connected(uri) as connection:
                version, major, wal_level, role, slots, senders = row(connection, _READINESS)
                try:
                    may_replicate(connection, uri)
                except CdcError as e:
                    refusal = f"{_sentence(e.message)} {e.solution}"
        except CdcError as e:
            return False, f"{_sentence(e.message)} {e.solution}"
        checks = (
            (
                major >= 14,
                f"Postgres {version} is supported.",
                f"Postgres {version} is too old. Use Postgres 14 or newer.",
            ),
            (
                wal_level == "logical",
                "wal_level is logical.",
                f"wal_level is {wal_level}. Set wal_level = logical and restart the server.",
            ),
            (not refusal, f"Role {role} may replicate.", refusal),
            (
                slots > 0,
                f"{slots} replication slots are free.",
                "No replication slot is free. Raise max_replication_slots or drop an unused slot.",
            ),
            (
                senders > 0,
                f"{senders} WAL senders are free.",
                "No WAL sender is free. Raise max_wal_senders or end an unused replication connection.",
            ),
        )
        sentences = [good if passed else bad for passed, good, bad in checks]
        return all(passed for passed, _, _ in checks), " ".join([f"Connected to {describe(uri)}.", *sentences])


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline whose connections Airflow resolved.

    :param path: the file, absolute.
    :param environment: variables with which another process reads the same pipeline from the file.
    """

    path: Path
    pipeline: Pipeline
    environment: Mapping[str, str] = field(repr=False)


def load_pipeline(path: str | os.PathLike[str]) -> LoadedPipeline:
    """Read a pipeline file with the connections of Airflow.

    :param path: a pipeline file.
    :raises ConfigError: when the file is wrong or names a connection that does not exist.
    """
    file = Path(path).absolute()
    environment: dict[str, str] = {}
    try:
        text = file.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        pass  # Pipeline.load says what is wrong with the file
    else:
        environment |= {name: os.environ[name] for name in _VARIABLE.findall(text) if name in os.environ}
        for key, conn_id in _connection_ids(document, environment):
            environment[f"AIRFLOW_CONN_{conn_id.upper()}"] = _resolve(key, conn_id)
    return LoadedPipeline(file, Pipeline.load(file, environment), environment)


def find_connection(conn_id: str, wanted_by: str = "") -> Connection:
    """Return a connection of Airflow.

    :param wanted_by: what names the connection, for the message.
    :raises ConfigError: when it does not exist.
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


def failure(message: str, solution: str, retry: str) -> AirflowException:
    """The exception that makes Airflow retry a task or not, as an error of the engine asks.

    :param retry: a value of :class:`~airflow_cdc_provider.engine.errors.Retry`.
    """
    text = f"{_sentence(message)}\n{solution}" if solution else _sentence(message)
    return AirflowException(text) if retry == Retry.RETRY.value else AirflowFailException(text)


@contextmanager
def airflow_failures() -> Iterator[None]:
    """Turn errors of the engine into failures of the task, with the solution in the text."""
    try:
        yield
    except CdcError as e:
        raise failure(e.message, e.solution, e.retry.value) from e


def _sentence(message: str) -> str:
    return message if message.endswith((".", "!", "?")) else f"{message}."


def _connection_ids(document: object, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each ``conn_id`` of source and sink with its key, variables in it expanded."""
    if not isinstance(document, dict):
        return
    for name in ("source", "sink"):
        section = document.get(name)
        conn_id = section.get("conn_id") if isinstance(section, dict) else None
        if isinstance(conn_id, str) and conn_id:
            yield f"{name}.conn_id", _VARIABLE.sub(lambda match: environment.get(match[1], match[0]), conn_id)


def _resolve(key: str, conn_id: str) -> str:
    """The value of a connection's variable; what is not Postgres is left to the engine to judge."""
    connection = find_connection(conn_id, key)
    return _libpq_uri(connection) if connection.conn_type in POSTGRES_TYPES else connection.get_uri()


def _libpq_uri(connection: Connection) -> str:
    """A libpq URI, without those extras that steer Airflow's own hooks and that libpq would refuse."""
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()} - _NOT_FROM_EXTRA
    extra = {
        key: str(value) for key, value in connection.extra_dejson.items() if key in known and value not in (None, "")
    }
    host = connection.host or ""
    if host.startswith("/"):  # the directory of a Unix socket cannot stand where a URI has its host
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
