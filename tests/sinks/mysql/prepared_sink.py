"""A started MySQL sink, and the queries of its tests on the server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pymysql

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.lsn import LOG_END
from airflow_cdc_provider.engine.sinks.mysql.session import Session
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.sinks.staged import Staged, StagedPiece
from local_servers.mariadb import MariadbServer
from tests.sinks.begun_sink import (
    IDENTITY,
    LABEL,
    TARGET,
)


def prepared(server: MariadbServer, mode: str = "mirror") -> tuple[MysqlSink, int]:
    """Return a sink at applied LSN 100 with one planned chunk, and the epoch of its first run."""
    sink = MysqlSink(server.dsn, "p", mode)  # type: ignore[arg-type]
    sink.prepare([TARGET], [Chunk(LABEL, 0, None, None)], IDENTITY, 100)
    return sink, sink.take_epoch("test")


def query(server: MariadbServer, statement: str) -> list[tuple[object, ...]]:
    with closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


def rows(server: MariadbServer) -> list[tuple[object, ...]]:
    return query(server, "SELECT id, note, CAST(amount AS CHAR) FROM `copy`.`Ord ers` ORDER BY id")


def piece(index: int, staged: tuple[Staged, ...]) -> StagedPiece:
    return StagedPiece("", "", index, 1, b"", staged, frozenset(), LOG_END)


def stage(sink: MysqlSink, epoch: int, effects: Sequence[Effect], index: int = 0) -> StagedPiece:
    return piece(index, sink.stage(epoch, f"test{index}", effects))


def alive(session: Session) -> bool:
    try:
        session.run("SELECT 1")
    except pymysql.MySQLError:
        return False
    return True
