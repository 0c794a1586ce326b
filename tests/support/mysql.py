"""A pipeline under test whose target is MariaDB."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from local_servers.mariadb import MariadbServer
from tests.conftest import PIPELINE_ROLE, Databases
from tests.support.pipelines import PipelineUnderTest


def query(server: MariadbServer, statement: str) -> list[tuple[Any, ...]]:
    """Execute a statement as the administrator; names may be in double quotes."""
    with closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_mode = CONCAT(@@sql_mode, ',ANSI_QUOTES')")
        cursor.execute(statement)
        return list(cursor.fetchall())


class MysqlPipeline(PipelineUnderTest):
    """A pipeline as :class:`PipelineUnderTest`; the target is a database of ``server``.

    The user has only the privileges that are documented: databases ``copy``, ``mirror`` and ``changelog``.
    """

    def __init__(
        self, directory: Path, databases: Databases, server: MariadbServer, tables: list[str], **sections: Any
    ) -> None:
        self.server = server
        sink = {
            "type": "mysql",
            "dsn": server.dsn.replace("//root@", f"//{PIPELINE_ROLE}@"),
            **sections.pop("sink", {}),
        }
        super().__init__(directory, databases, tables, sink=sink, **sections)

    def target(self, *statements: str) -> None:
        """Execute statements on the target."""
        for statement in statements:
            query(self.server, statement)

    def target_rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Query the target."""
        return query(self.server, statement)
