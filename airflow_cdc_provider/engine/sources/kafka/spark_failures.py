"""Translates errors of Spark's batches and queries into errors of the engine, by their texts."""

from __future__ import annotations

import re

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ConfigError,
    GateClosed,
    LimitExceeded,
    StreamFailed,
    ValueRefused,
)
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.avro_texts import carried_error
from airflow_cdc_provider.engine.sources.kafka.position import REPAIR

_LOST = re.compile(r"OffsetOutOfRange|KAFKA_DATA_LOSS|failOnDataLoss|UNABLE_TO_DETECT_PARTITION_OFFSET_CHANGED")
_BEGINS_LATE = re.compile(r"ADDED_PARTITION_DOES_NOT_START_FROM_OFFSET_ZERO")
_REFUSED_SIZE = re.compile(r"RecordTooLargeException: [^\n]*")
# SQL's error class for data, and the code of assert_true() and raise_error().
_DATA = re.compile(r"SQLSTATE: (22\w{3}|P0001)")
_CAUSE = re.compile(r"^Caused by: (.+)$", re.MULTILINE)
# The last failed task: its host and its error.
_TASK = re.compile(r"most recent failure: Lost task \S+ in stage \S+ \(TID \d+\) \(.*?\): (.+)")
_CALL = re.compile(r"^An error occurred while calling \S+\n: (.+)$", re.MULTILINE)

CORRECT = (
    "Nothing of its batch was applied. Change source.sql so that the target accepts its result (with try_cast(),"
    " nanvl(), left() or a condition); this is impossible if the query keeps state. Or have such messages written to"
    " another topic with source.bad_records: {dead_letter: …}"
)
"""The remedy for a message that cannot become a row, without its final period."""
_OF_TABLES = re.compile(r"resnapshot|`columns`|source\.tables|at the source")


def spark_failure(text: str) -> CdcError:
    """Return the error for a text with which Spark ended a batch or the query."""
    error = message_view.bad_record(text) or carried_error(text)
    if error is not None:
        return error
    said = cause_of(text)
    if _BEGINS_LATE.search(text):
        return GateClosed(
            f"unread messages at the start of a new partition were removed: {said}",
            "If the query keeps no state, remove the pipeline's checkpoint (source.checkpoint, or checkpoint in its"
            " state directory) and start again: the stream continues from the commit record, with the messages that the"
            f" partition still has. Otherwise: {REPAIR} To prevent this, raise the topic's retention.",
        )
    if _LOST.search(text):
        return GateClosed(
            f"unread messages were removed from their topic: {said}",
            "Start again; the error will then name the missing messages and the repair.",
        )
    if _DATA.search(text):
        return ValueRefused(f"source.sql fails on a message: {said}", CORRECT, "source.sql fails on a message")
    found = _REFUSED_SIZE.search(text)
    if found is not None:
        beyond = f"a message is too large to be written to the topic for dead letters: {found[0]}"
        return LimitExceeded(
            beyond,
            "Nothing of its batch was applied. Raise max.message.bytes of the topic in source.bad_records (with"
            " `kafka-configs --alter`), and message.max.bytes in `source.properties` if it is set there. Or skip the"
            " message with `airflow-cdc skip`, and start again.",
            beyond,
        )
    return StreamFailed(
        f"the streaming query ended: {said}",
        "Start it again: it continues from the last commit. See Spark's log for the complete error.",
        "the streaming query ended",
    )


def cause_of(text: str) -> str:
    """Return the line of a Spark error that gives the cause: its last cause, without the errors that merely wrap it."""
    causes = _CAUSE.findall(text) or _TASK.findall(text) or _CALL.findall(text)
    return str(causes[-1]) if causes else next((line for line in text.splitlines() if line.strip()), "no message")


def with_topic_remedy(error: CdcError) -> CdcError:
    """Replace a sink error's remedy for database tables by one for topics."""
    if not _OF_TABLES.search(error.solution):
        return error
    if isinstance(error, ConfigError):
        remedy = "Change the result of source.sql: names with AS, types with CAST, or fewer columns; adapt source.key."
    elif isinstance(error, LimitExceeded | ValueRefused):
        remedy = f"{CORRECT}. Then start again."
    else:
        remedy = f"Find out what changed the sink, and undo it. If that is impossible: {REPAIR}"
    error.solution = remedy
    return error
