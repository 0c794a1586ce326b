"""Errors with which Spark ends a query, in its own wording, and the reports about them."""

from __future__ import annotations

import pytest

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ForeignTable,
    GateClosed,
    LimitExceeded,
    StreamFailed,
    UncapturableTable,
    ValueRefused,
)
from airflow_cdc_provider.engine.sources.kafka.spark_failures import cause_of, spark_failure, with_topic_remedy

JOB = """An error occurred while calling o55.save.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent \
failure: Lost task 0.0 in stage 1.0 (TID 1) (host executor driver): {}
\tat org.apache.kafka.clients.producer.KafkaProducer.send(KafkaProducer.java:1)

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:1)
"""
TOO_LARGE = "org.apache.kafka.common.errors.RecordTooLargeException: The message is 1500000 bytes when serialized"


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (
            JOB.format("java.io.IOException: No space left on device"),
            StreamFailed,
            "ended: java.io.IOException: No space",
        ),
        (
            JOB.format("java.lang.Exception: x") + "Caused by: java.net.Dead: gone\n\tat a.b(c)",
            StreamFailed,
            "net.Dead",
        ),
        (JOB.format(TOO_LARGE), LimitExceeded, "1500000 bytes"),
        ("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012\n== SQL ==", ValueRefused, "Division by zero"),
        ("[USER_RAISED_EXCEPTION] on purpose SQLSTATE: P0001", ValueRefused, "on purpose"),
        ("[CAST_INVALID_INPUT] The value 'x' SQLSTATE: 22018", ValueRefused, "The value 'x'"),
        ("[KAFKA_DATA_LOSS.SOME] t-1 SQLSTATE: 22000", GateClosed, "t-1"),
        ("", StreamFailed, "no message"),
    ],
)
def test_a_failure_is_told_by_its_cause(text: str, kind: type[CdcError], said: str) -> None:
    found = spark_failure(text)
    assert type(found) is kind
    assert said in found.message
    assert "Traceback" not in cause_of(text)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LimitExceeded.by("staging: too large"), "source.sql"),
        (ValueRefused("no", "Cast it at the source."), "source.sql"),
        (UncapturableTable("two names", "Choose its columns by `columns` in the pipeline file."), "AS"),
        (GateClosed("behind", "Run `airflow-cdc resnapshot --all`."), "airflow-cdc drop"),
    ],
)
def test_a_remedy_for_tables_becomes_one_for_topics(error: CdcError, said: str) -> None:
    found = with_topic_remedy(error)
    assert found is error
    assert said in found.solution
    assert "resnapshot" not in found.solution


def test_other_remedies_stay() -> None:
    error = ForeignTable("rows", "Empty or drop the table.")
    assert with_topic_remedy(error).solution == "Empty or drop the table."
