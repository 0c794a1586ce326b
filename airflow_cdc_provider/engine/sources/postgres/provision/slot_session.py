"""Sessions of the role that may replicate, which is the role that reads the tables unless the file names another one.

A role that may replicate can read every row of the server through the log. A role that reads tables can be made to run
code by the tables' owners. With two roles, neither has both abilities.
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
    """Give a session in which slots can be made, moved and dropped, and walsenders of the pipeline be ended.

    :param source: a session of the role that reads; it is used if the file names no other role.
    """
    if not names.replication_dsn:
        yield source
        return
    with connected(names.replication_dsn) as session:
        yield session


def reader_of(names: PostgresSourceSettings, slot: str | None = None) -> str:
    """Return the ``application_name`` of a pipeline's own reader of a slot.

    :param slot: the file's by default.
    """
    return reader_name(names.log_dsn, slot or names.slot)


def drop_own_slot(names: PostgresSourceSettings, source: Connection, slot: str | None = None) -> None:
    """Remove a slot, see :func:`.drop_slot`.

    :param source: as of :func:`slot_session`.
    :param slot: the file's by default.
    """
    with slot_session(names, source) as session:
        scalar(source, "SELECT 1")  # raises an error if another command has taken over, and ended that session
        drop_slot(session, slot or names.slot, reader_of(names, slot))
