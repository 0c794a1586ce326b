"""The connection type ``postgres_cdc``: a Postgres server that is the source or the target of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from airflow.providers.common.sql.hooks.sql import DbApiHook

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.sources.postgres.settings import PostgresSourceSettings
from airflow_cdc_provider.hooks.connections import POSTGRES_TYPES, find_connection, postgres_uri, require_type

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_cdc_provider.engine.core.findings import Finding


class PostgresCdcHook(DbApiHook):
    """A Postgres server that changes are captured from, or copied into; operators for SQL can use it, too.

    :param postgres_cdc_conn_id: a connection of type ``postgres_cdc`` or ``postgres``.
    """

    conn_name_attr = "postgres_cdc_conn_id"
    default_conn_name = "postgres_cdc_default"
    conn_type = "postgres_cdc"
    hook_name = "Postgres CDC"
    supports_autocommit = True
    supports_executemany = True

    postgres_cdc_conn_id: str
    schema: str | None = None
    """A database instead of the connection's; operators for SQL set it to their ``database``."""

    def get_uri(self) -> str:
        """Return the connection as a libpq URI.

        :raises ConfigError: if the connection does not exist, or has another type.
        """
        return postgres_uri(self._server())

    def get_conn(self) -> Any:
        """Open a connection of psycopg2 with the settings of the role, as statements of users expect it.

        The engine's own sessions have other settings, among them an empty ``search_path``.
        """
        import psycopg2

        return psycopg2.connect(self.get_uri())

    def test_connection(self) -> tuple[bool, str]:  # type: ignore[override]
        """Check whether the server can be used as the extra field ``use`` states, without changing anything.

        ``use`` is ``source`` or ``target``; for a source, the extra fields ``slot`` and ``publication`` name the slot
        and the publication that a pipeline will use.

        :returns: whether all checks passed, and one sentence for each check, failures first.
        """
        try:
            findings = _check(self._server())
        except CdcError as e:
            return False, f"{sentence(e.message)} {e.solution}"
        by_weight = sorted(findings, key=lambda finding: (finding.ok, not finding.warning))
        return all(finding.ok for finding in findings), " ".join(map(_in_sentences, by_weight))

    def _server(self) -> Connection:
        connection = find_connection(self.postgres_cdc_conn_id)
        require_type(connection, POSTGRES_TYPES)
        return attrs.evolve(connection, schema=self.schema) if self.schema else connection


def _check(connection: Connection) -> list[Finding]:
    from airflow_cdc_provider.engine.sinks.postgres import checks as target
    from airflow_cdc_provider.engine.sources.postgres.provision.readiness import check_server

    extra = connection.extra_dejson
    if extra.get("use") == "target":
        return target.check_server(postgres_uri(connection))
    slot, publication = (extra.get(name) or "" for name in ("slot", "publication"))
    return check_server(PostgresSourceSettings(postgres_uri(connection), (), slot, publication))


def sentence(message: str) -> str:
    """Return a message with a period, which errors of the engine omit."""
    return message if message.endswith((".", "!", "?")) else f"{message}."


def _in_sentences(finding: Finding) -> str:
    return f"{finding.message} {finding.error.solution}" if finding.error else finding.message
