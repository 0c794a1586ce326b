"""Reads data for triggers from the servers of a pipeline: all slots of the source, and the sink's commit record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.hooks.cdc import load_pipeline
from airflow_cdc_provider.hooks.metrics import SlotMetrics

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.record import Record
    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
    from airflow_cdc_provider.engine.postgres.connection import Connection
    from airflow_cdc_provider.engine.postgres.slots import Slots


@dataclass(frozen=True)
class WatchedSlot:
    """A slot that is watched, with Airflow's connections resolved.

    :param dsn: the DSN of the slot's server.
    """

    slot: str
    dsn: str = field(repr=False)
    pipeline: Pipeline | None = field(default=None, repr=False)

    @classmethod
    def resolve(cls, pipeline: str | None, conn_id: str | None, slot: str | None) -> WatchedSlot:
        """Find the server and the slot's name; must not run in an event loop, because it asks Airflow for connections.

        :param pipeline: path of a pipeline file; without it, connection and slot are required.
        :raises ConfigError: if the file is invalid, or a connection does not exist.
        """
        if pipeline is None:
            from airflow_cdc_provider.hooks.postgres_cdc import PostgresCdcHook

            return cls(str(slot), PostgresCdcHook(str(conn_id)).get_uri())
        loaded = load_pipeline(pipeline).pipeline
        return cls(postgres_settings(loaded).slot, postgres_settings(loaded).dsn, loaded)


class SlotsReader:
    """A reader of all slots of a server, with one query over a permanent connection.

    :param dsn: the DSN of the server.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: Connection | None = None
        self._metrics: SlotMetrics | None = None

    def read(self) -> Slots:
        """Query once, and send the result to Airflow's metrics.

        :raises CdcError: if the server cannot be reached.
        """
        import psycopg2

        from airflow_cdc_provider.engine.postgres.connection import connect, describe
        from airflow_cdc_provider.engine.postgres.driver_errors import driver_failure
        from airflow_cdc_provider.engine.postgres.slots import read_slots

        try:
            if self._connection is None:
                self._connection = connect(self._dsn, "airflow-cdc triggerer")
            slots = read_slots(self._connection)
        except psycopg2.Error as e:
            self.close()
            raise driver_failure(e, f"the slots of {describe(self._dsn)} cannot be read") from e
        self._metrics = self._metrics or SlotMetrics(self._dsn)
        self._metrics.report(slots)
        return slots

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class RecordReader:
    """A reader of a pipeline's commit record in its sink."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def read(self) -> Record | None:
        """Query once.

        :raises CdcError: if the sink cannot be reached.
        """
        import psycopg2

        from airflow_cdc_provider.engine.postgres.driver_errors import driver_failure
        from airflow_cdc_provider.engine.runs.commit_records import commit_record_of

        try:
            return commit_record_of(self._pipeline).record()
        except psycopg2.Error as e:
            raise driver_failure(e, "the commit record cannot be read") from e

    def close(self) -> None:
        """Do nothing, because there is no permanent connection."""
