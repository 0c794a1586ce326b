"""Removes a pipeline: its objects on the source, its record in the sink, its state; never target tables.

A slot that stays behind keeps its server's log until the disk is full. So nothing is removed while the source does not
answer, unless the user says that it is gone. Then the statements that remove possible leftovers are returned.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

from airflow_cdc_provider.engine.core.errors import ConnectionFailed
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, describe, quoted
from airflow_cdc_provider.engine.runs.commit_records import commit_record_of, record_if_any
from airflow_cdc_provider.engine.runs.record_copy import forget_record_copy, read_record_copy, require_same_source
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import drop_publication
from airflow_cdc_provider.engine.sources.postgres.provision.provision_lock import take_provision_lock
from airflow_cdc_provider.engine.sources.postgres.provision.slot_session import drop_own_slot
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.location import clear, refuse_others

PROVISIONING = "provisioning.json"
"""In the state: the slot of a provisioning that has not written its record yet."""

_log = logging.getLogger(__name__)


def remove(pipeline: Pipeline, takeover: bool, source_gone: bool) -> list[str]:
    """Remove slot, publication, state, sink record and staging; after an error, nothing has been removed.

    :param source_gone: go on if the source cannot be reached.
    :returns: the statements that would remove what may be left on the source.
    :raises ConfigError: when the state is that of another pipeline, or another type of source has filled a sink.
    :raises ConnectionFailed: when a server cannot be reached.
    :raises SecondWriter: when another run is alive and ``takeover`` is not set, or another program reads from the slot.
    """
    state, records = State(pipeline.state), commit_record_of(pipeline)
    refuse_others(state, pipeline.name)
    require_same_source(pipeline, state)
    with ExitStack() as stack:
        source = None
        try:
            source = stack.enter_context(connected(postgres_settings(pipeline).dsn, writes=True))
        except ConnectionFailed as e:
            if not source_gone:
                raise type(e)(
                    e.message,
                    f"{e.solution} If the source is gone for good, add --source-gone: record and state are removed"
                    " then. Do not while it may come back: its slot would keep log until the disk is full.",
                ) from e
        else:
            take_provision_lock(source, pipeline.name, takeover)
        record = record_if_any(pipeline)
        refuse_second_writer(state, record.epoch if record else 0, None, takeover)
        if source is not None:
            remove_slot(source, pipeline, record, state)
            left = []
        else:
            left = _left_behind(pipeline, record, state)
    forget_record_copy(state)
    records.drop()
    clear(state)
    if left:
        _log.warning(
            "%s cannot be reached, so what pipeline %s has made there stays. If that server still runs, or comes back,"
            " the slot keeps its log UNTIL ITS DISK IS FULL. Then run there: %s",
            describe(postgres_settings(pipeline).dsn),
            pipeline.name,
            " ".join(f"{statement};" for statement in left),
        )
    return left


def remove_slot(source: Connection, pipeline: Pipeline, record: Record | None, state: State) -> None:
    """Remove the slot of the record, and the publication if it was made with it; never those of others.

    If there is no record, they are taken from the state.
    """
    slot, publication = _made(pipeline, record, state)
    if slot is not None:
        drop_own_slot(postgres_settings(pipeline), source, slot)
    if publication is not None:
        drop_publication(source, publication)


def _left_behind(pipeline: Pipeline, record: Record | None, state: State) -> list[str]:
    """Return the statements with which a person can do what :func:`remove_slot` does."""
    slot, publication = _made(pipeline, record, state)
    drop_slot_ = [f"SELECT pg_drop_replication_slot('{slot}')"] if slot is not None else []
    return drop_slot_ + ([f"DROP PUBLICATION {quoted(publication)}"] if publication is not None else [])


def _made(pipeline: Pipeline, record: Record | None, state: State) -> tuple[str | None, str | None]:
    """Return the slot and the publication that the pipeline has made."""
    known = record or read_record_copy(pipeline, state)
    if known is None:
        left = state.read_as(PROVISIONING, _as_provisioning)
        return None if left is None else left["slot"], None
    made = RecordedSlot.of(known.identity)
    return made.slot_identity.slot, postgres_settings(pipeline).publication if made.created_publication else None


def _as_provisioning(values: dict[str, Any]) -> dict[str, Any]:
    as_type(values["slot"], str, "slot")
    return values
