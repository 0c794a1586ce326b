"""What Spark ends a batch or a query for, by its words, as errors of the engine."""

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
# SQL's class of errors of data, and what assert_true() and raise_error() say.
_DATA = re.compile(r"SQLSTATE: (22\w{3}|P0001)")
_CAUSE = re.compile(r"^Caused by: (.+)$", re.MULTILINE)
# Of the last task that failed: where it ran, and what it failed with.
_TASK = re.compile(r"most recent failure: Lost task \S+ in stage \S+ \(TID \d+\) \(.*?\): (.+)")
_CALL = re.compile(r"^An error occurred while calling \S+\n: (.+)$", re.MULTILINE)

CORRECT = (
    "Nothing of its batch was applied. Change source.sql so that it returns what the target takes (by try_cast(),"
    " nanvl(), left() or a condition), which a query that keeps state does not allow; or have such messages written to"
    " another topic by source.bad_records: {dead_letter: …}"
)
"""What helps when a message cannot become a row, up to a stop."""
_OF_TABLES = re.compile(r"resnapshot|`columns`|source\.tables|at the source")


def failure_of(text: str) -> CdcError:
    """What Spark has ended a batch or the query for, by its words."""
    told = message_view.bad_record(text) or carried_error(text)
    if told is not None:
        return told
    said = cause_of(text)
    if _BEGINS_LATE.search(text):
        return GateClosed(
            f"the first messages of a partition that came later are gone from it, unread: {said}",
            "If the query keeps no state, remove the pipeline's checkpoint (source.checkpoint, or checkpoint in its"
            " state) and start again: it goes on from the commit record, with what the partition still has. Otherwise:"
            f" {REPAIR} So that it does not happen again, raise the topic's retention.",
        )
    if _LOST.search(text):
        return GateClosed(
            f"messages that have not been read are gone from their topic: {said}",
            "Start again: what is missing is then looked for, and told with the repair.",
        )
    if _DATA.search(text):
        return ValueRefused(f"source.sql fails on a message: {said}", CORRECT, "source.sql fails on a message")
    found = _REFUSED_SIZE.search(text)
    if found is not None:
        beyond = f"the brokers, or their client, take no message as large as one for the dead letters: {found[0]}"
        return LimitExceeded(
            beyond,
            "Nothing of its batch was applied. Raise max.message.bytes of the topic source.bad_records names"
            " (`kafka-configs --alter`), and message.max.bytes of `source.properties` if it is set there; or pass the"
            " message by `airflow-cdc skip`, and start again.",
            beyond,
        )
    return StreamFailed(
        f"the streaming query ended: {said}",
        "Start again: it goes on from the last commit. Spark's log has the whole error.",
        "the streaming query ended",
    )


def cause_of(text: str) -> str:
    """Return the line of an error of Spark's that tells why: its last cause, without what merely passed it on."""
    causes = _CAUSE.findall(text) or _TASK.findall(text) or _CALL.findall(text)
    return str(causes[-1]) if causes else next((line for line in text.splitlines() if line.strip()), "no message")


def fitting(error: CdcError) -> CdcError:
    """Give an error of a sink a solution for topics, in place of one for the tables of a database."""
    if not _OF_TABLES.search(error.solution):
        return error
    if isinstance(error, ConfigError):
        remedy = "Change what source.sql returns: names by AS, types by CAST, fewer columns; and source.key with it."
    elif isinstance(error, LimitExceeded | ValueRefused):
        remedy = f"{CORRECT}. Then start again."
    else:
        remedy = f"See what has changed the sink. If it cannot be put back: {REPAIR}"
    error.solution = remedy
    return error
