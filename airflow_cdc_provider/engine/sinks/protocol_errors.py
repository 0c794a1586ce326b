"""Refusals that both templates of a sink raise: the one with transactions, and the one with a log of entries."""

from __future__ import annotations

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import GateClosed, SecondWriter, StagingLost, StreamFailed
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity


def require_origin(chunk: Chunk, origin: ServerIdentity, noted: ServerIdentity) -> None:
    """Refuse a chunk from a server other than the recorded one.

    :raises StreamFailed: naming both.
    """
    if noted != origin:
        raise StreamFailed(
            f"chunk {chunk.title} was read from {origin}, but the pipeline has gone on to {noted}",
            "Start again: the chunk is then read from that server.",
        )


def require_adjoining(pipeline: str, start: LogPosition, end: LogPosition, applied: LogPosition) -> None:
    """Refuse a unit that does not begin where the record ends.

    :raises GateClosed: naming both.
    """
    if start != applied:
        raise GateClosed(
            f"the unit ({format_lsn(start)}, {format_lsn(end)}] of pipeline {pipeline} does not begin at the applied"
            f" LSN {format_lsn(applied)}: transactions would be lost or repeated",
            "Start the pipeline again; it continues from the applied LSN. If the sink was restored from a backup, run"
            " `airflow-cdc resnapshot --all`.",
        )


def read_again_since(labels: str) -> StagingLost:
    """Return the error for rows that were read after a piece was staged; the piece would undo changes in them."""
    return StagingLost(
        f"rows of {labels} were read again after the unit had been staged",
        "Start again: the unit is staged again, without the changes in those rows.",
    )


def provisioned_meanwhile(pipeline: str) -> SecondWriter:
    """Return the error for a record that another run has created meanwhile."""
    return SecondWriter(
        f"another run has provisioned pipeline {pipeline} meanwhile",
        "If the other run is intended, no action is needed; otherwise stop it and start again.",
    )
