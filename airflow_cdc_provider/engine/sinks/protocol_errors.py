"""What both templates of a sink refuse in the same words: that of transactions, and that of a log of entries."""

from __future__ import annotations

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import GateClosed, SecondWriter, StagingLost, StreamFailed
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.postgres.server_identity import Origin


def require_origin(chunk: Chunk, origin: Origin, noted: Origin) -> None:
    """Refuse a chunk from another server than the record knows.

    :raises StreamFailed: naming both.
    """
    if noted != origin:
        raise StreamFailed(
            f"chunk {chunk.title} is read from {origin}, but the pipeline has gone on to {noted}",
            "Start again: the chunk is then read there.",
        )


def require_adjoining(pipeline: str, start: LogPosition, end: LogPosition, applied: LogPosition) -> None:
    """Refuse a unit that does not begin where the record ends.

    :raises GateClosed: naming both.
    """
    if start != applied:
        raise GateClosed(
            f"the unit ({format_lsn(start)}, {format_lsn(end)}] of pipeline {pipeline} does not begin at the applied"
            f" LSN {format_lsn(applied)}: transactions would be lost or repeated",
            "Start the pipeline again; it goes on from the applied LSN. If the sink was restored from a backup, run"
            " `airflow-cdc resnapshot --all`.",
        )


def read_again_since(labels: str) -> StagingLost:
    """Rows that were read since a piece was staged hold changes that it would take back."""
    return StagingLost(
        f"rows of {labels} were read again after the unit had been staged",
        "Start again: the unit is staged anew, without what has been read.",
    )


def provisioned_meanwhile(pipeline: str) -> SecondWriter:
    """There is a record by now."""
    return SecondWriter(
        f"another run has provisioned pipeline {pipeline} meanwhile",
        "Nothing to do if the other run is meant; otherwise stop it and start again.",
    )
