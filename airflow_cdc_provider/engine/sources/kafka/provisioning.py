"""Prepares a pipeline over topics: checks, target tables, commit record.

Nothing is created at the source. The first offsets are recorded before anything is read, so that an interrupted first
run begins there again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.findings import Checks, Finding, require
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.core.record import Record, noted_by
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.driver_checks import convert_driver_errors
from airflow_cdc_provider.engine.runs.commit_records import (
    existing_record,
    identity_of,
    record_if_any,
    require_targets,
    sink_of,
)
from airflow_cdc_provider.engine.runs.record_copy import write_record_copy
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer, require_epoch, take_epoch
from airflow_cdc_provider.engine.runs.sink_checks import (
    check_targets,
    require_mode,
    target_for,
    target_name,
)
from airflow_cdc_provider.engine.sources.kafka.gate import pass_gate
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics
from airflow_cdc_provider.engine.sources.kafka.query_difference import text_difference
from airflow_cdc_provider.engine.sources.kafka.settings import topic_settings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip, noted
from airflow_cdc_provider.engine.sources.kafka.spark_failures import with_topic_remedy
from airflow_cdc_provider.engine.sources.kafka.topics import Topics
from airflow_cdc_provider.engine.state.files import State

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_cdc_provider.engine.sources.kafka.query import QueryResult

# Checks of sinks that do not concern a table; :func:`check` has reported them already.
_WITHOUT_TABLE = (
    *("sink", "sink functions", "sink server", "sink durability", "sink loading", "codec", "commit record"),
    *("transaction timeout", "transactions", "schema registry", "encryption", "identity", "source"),
)


def check_query(pipeline: Pipeline, spark: SparkSession) -> list[Finding]:
    """Check the result of a pipeline's query, and whether the sinks can have a table for it; change nothing."""
    from airflow_cdc_provider.engine.sources.kafka.query import query_result

    checks = Checks(convert_driver_errors)

    def described(found: QueryResult) -> str:
        kept = "state" if found.stateful else "no state"
        return f"The query returns {len(found.table.columns)} columns, and keeps {kept}."

    result = checks.run("query", lambda: query_result(spark, pipeline), described)
    return checks.findings + (_check_table(pipeline, result.table) if result is not None else [])


def _check_table(pipeline: Pipeline, table: Table) -> list[Finding]:
    """Check whether the sinks can have a table, without repeating the checks that need no table."""
    checks, topics = Checks(convert_driver_errors), Topics(topic_settings(pipeline))
    cluster = checks.run("source", topics.cluster.id)
    identity = None if cluster is None else topics.identity(cluster)
    for branch in pipeline.branches:
        check_targets(checks, branch, [table], identity)
    return [
        finding if finding.error is None else replace(finding, error=with_topic_remedy(finding.error))
        for finding in checks.findings
        if finding.check not in _WITHOUT_TABLE or not finding.ok
    ]


def provision(pipeline: Pipeline, takeover: bool) -> Record:
    """Create or verify target tables and commit records; take the epoch of a run.

    :raises CdcError: when something prevents it. Nothing has been changed then, except in sinks that were prepared
        before the one that refused.
    """
    state = State(pipeline.state)
    record = record_if_any(pipeline)
    refuse_second_writer(state, record.epoch if record else 0, None, takeover)
    new = [branch for branch in pipeline.branches if record is None or sink_of(branch).record() is None]
    for branch in pipeline.branches:
        if branch not in new:
            _require_same(branch, existing_record(branch), _meaning(pipeline))
    if new:
        _begin(pipeline, new, record)
    epoch = take_epoch(pipeline, state, takeover)
    for branch in pipeline.branches:
        _note_epochs(branch, epoch, _meaning(pipeline))
    record = existing_record(pipeline)
    require_epoch(record, epoch)
    write_record_copy(pipeline, state, record)
    for branch in pipeline.branches:
        own = existing_record(branch)
        require_targets(branch, sink_of(branch), own)
        pass_gate(Topics(topic_settings(pipeline)), RecordedTopics.of(own))
    return record


def _begin(pipeline: Pipeline, new: Sequence[Pipeline], record: Record | None) -> None:
    """Create the records of sinks, all at the same offsets; if an interrupted attempt left records, at their offsets.

    :raises ConfigError: when other sinks have gone on from there.
    """
    if record is not None and record.applied:
        raise ConfigError(
            f"sink: cannot add {new[0].sink.place} because the pipeline has read its topics up to unit"
            f" {record.applied}, and the sink would lack everything before",
            "Fill it with a pipeline of another name.",
        )
    table, stateful = _look_at_query(pipeline)
    require(_check_table(pipeline, table))
    notes = _first_notes(pipeline, stateful) if record is None else noted_by("kafka", record.identity)
    for branch in new:
        sink_of(branch).prepare([target_for(branch, table)], [], identity_of(branch, notes), LOG_START)


def _look_at_query(pipeline: Pipeline) -> tuple[Table, bool]:
    from airflow_cdc_provider.engine.sources.kafka.query import query_result
    from airflow_cdc_provider.engine.spark.session import spark_session

    with spark_session(pipeline.spark_start, "provision") as spark:
        result = query_result(spark, pipeline)
    return result.table, result.stateful


def _first_notes(pipeline: Pipeline, stateful: bool) -> dict[str, Any]:
    source = topic_settings(pipeline)
    topics = Topics(source)
    named = topics.named()
    offsets = topics.beginnings(named) if source.starting == "earliest" else topics.ends(named)
    ids = {topic.name: topic.id for topic in named}
    return RecordedTopics(
        LOG_START, topics.cluster.id(), offsets, offsets, ids, _meaning(pipeline), stateful, None, 0
    ).to_notes()


def _meaning(pipeline: Pipeline) -> Mapping[str, Any]:
    """Return the settings that determine rows and state; the sinks may determine the output."""
    from airflow_cdc_provider.engine.sources.kafka.query import output_of

    return {**topic_settings(pipeline).meaning, "output": output_of(pipeline)}


def _require_same(branch: Pipeline, record: Record, meaning: Mapping[str, Any]) -> None:
    """Refuse a file whose meaning differs from the rows already written or from the state already kept.

    :param meaning: see :func:`_meaning`, of the whole pipeline.
    :raises ConfigError: naming the key.
    """
    position = RecordedTopics.of(record)
    require_mode(branch, record.identity)
    for target in record.targets:
        if (target.schema, target.name) != target_name(branch, target.table):
            raise ConfigError(
                f"sink.schema: {branch.sink.schema!r}, but {target.table.label} has been provisioned into"
                f" {target.schema}.{target.name}",
                "Put the schema back, or use another pipeline name for the other schema.",
            )
    fixed = meaning.keys() if position.stateful else ("table", "key")
    recorded = _with_epochs(position.query, meaning)
    for name in fixed:
        if meaning[name] != recorded.get(name):
            raise ConfigError(
                f"source.{name} is not what the pipeline has been provisioned with:\n"
                f"{text_difference(recorded.get(name), meaning[name])}",
                "Put it back, or use another pipeline name. A query that keeps state cannot be changed because its"
                " state belongs to the earlier query.",
            )


def _with_epochs(recorded: Mapping[str, Any], meaning: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recorded query with added epoch units; before they were added, such numbers never became rows."""
    if "epochs" not in meaning:
        return recorded
    return {**recorded, "epochs": {**meaning["epochs"], **recorded.get("epochs", {})}}


def _note_epochs(branch: Pipeline, epoch: int, meaning: Mapping[str, Any]) -> None:
    """Record epoch units that the file has gained, if the query keeps state: from now on its state depends on them."""
    position = RecordedTopics.of(existing_record(branch))
    query = _with_epochs(position.query, meaning)
    if position.stateful and query != position.query:
        sink_of(branch).record_source(epoch, {"query": query})


def skip(pipeline: Pipeline, skips: Sequence[Skip], takeover: bool) -> Record:
    """Record in the sinks' records that messages are to be skipped from now on.

    :raises ConfigError: when a message is in no topic that is read, has been read already, or does not exist yet.
    :raises SecondWriter: when another run is alive and ``takeover`` is not set.
    """
    positions = [RecordedTopics.of(existing_record(branch)) for branch in pipeline.branches]
    ends = Topics(topic_settings(pipeline)).written_ends()
    read = max(positions, key=lambda position: position.applied).offsets
    for each in skips:
        p = str(each.partition)
        begin, end = read.get(each.topic, {}).get(p, 0), ends.get(each.topic, {}).get(p, 0)
        if not begin <= each.first <= each.last < end:
            there = f"offsets {begin} to {end - 1}" if begin < end else "none"
            raise ConfigError(
                f"cannot skip {each.place} because the unread messages of its partition are: {there}",
                "Give topic, partition and offset as in the error. Messages that have been read are in the sinks.",
            )
    known = {skip for position in positions for skip in position.skipped}
    state = State(pipeline.state)
    epoch = take_epoch(pipeline, state, takeover)
    for branch in pipeline.branches:
        sink_of(branch).record_source(epoch, noted({*known, *skips}))
    record = existing_record(pipeline)
    write_record_copy(pipeline, state, record)
    return record
