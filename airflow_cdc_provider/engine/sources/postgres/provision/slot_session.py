"""Sessions of the role that may replicate: the one that reads the tables, unless the pipeline file names another.

Who may replicate may read every row of the server by the log, and who reads tables can be made to run code by those who
own them. Of two roles neither has both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow_cdc_provider.engine.postgres.connection import Connection, connected, scalar
from airflow_cdc_provider.engine.postgres.slots import reader_name
from airflow_cdc_provider.engine.sources.postgres.provision.slot import drop_slot
from airflow_cdc_provider.engine.sources.postgres.settings import PostgresSourceSettings


@contextmanager
def slot_session(names: PostgresSourceSettings, source: Connection) -> Iterator[Connection]:
    """A session in which slots can be made, moved and dropped, and walsenders of the pipeline be ended.

    :param source: one of the role that reads; it is taken where the file names no other role.
    """
    if not names.replication_dsn:
        yield source
        return
    with connected(names.replication_dsn) as session:
        yield session


def reader_of(names: PostgresSourceSettings, slot: str | None = None) -> str:
    """The ``application_name`` of a pipeline's own reader of a slot.

    :param slot: the file's by default.
    """
    return reader_name(names.log_dsn, slot or names.slot)


def drop_own_slot(names: PostgresSourceSettings, source: Connection, slot: str | None = None) -> None:
    """Remove a slot, see :func:`.drop_slot`.

    :param source: as of :func:`slot_session`.
    :param slot: the file's by default.
    """
    with slot_session(names, source) as session:
        scalar(source, "SELECT 1")  # raises where another command has taken over, and ended that session
        drop_slot(session, slot or names.slot, reader_of(names, slot))
