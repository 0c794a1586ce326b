"""What a user can ask of a pipeline, one function a command, for the command line and for Airflow.

Each takes a pipeline, is idempotent, returns plain JSON values and raises
:class:`.CdcError`. ``snapshot`` and ``stream`` start Spark; the others do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.commands import preflight as checks
from airflow_cdc_provider.engine.commands.attention import (
    NEEDED,
    STARTING,
    noting_errors,
    source_trouble,
    starting,
    trouble_in_state,
)
from airflow_cdc_provider.engine.commands.run_start import rehearse, require_copied, run_with_spark, spark_before
from airflow_cdc_provider.engine.comparison.compare import compare, ranges_in
from airflow_cdc_provider.engine.core.chunk_ranges import Range, part_of
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, ConnectionFailed
from airflow_cdc_provider.engine.core.findings import Finding, require
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.stream_end import Ending
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.kinds import Maintained
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import Connection, connected
from airflow_cdc_provider.engine.runs.record_copy import write_ledger
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.runs.run import (
    PROVISION,
    RESNAPSHOT,
    STREAM,
    budget_of,
    commit_record_of,
    existing_record,
    last_error,
    record_if_any,
    refuse_second_writer,
    request_stop,
    run_part,
    sink_of,
)
from airflow_cdc_provider.engine.sinks.all_records import merged
from airflow_cdc_provider.engine.sinks.contract import Record
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning, removal, slot
from airflow_cdc_provider.engine.sources.postgres.provision.gate import gate
from airflow_cdc_provider.engine.sources.postgres.reading import reread
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import PATIENCE_SECONDS, Barriers
from airflow_cdc_provider.engine.state import requests
from airflow_cdc_provider.engine.state.chunk_progress import chunk_grid
from airflow_cdc_provider.engine.state.files import Heartbeat, State, read_heartbeats

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_cdc_provider.engine.runs.run import Run
    from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamProgress

Report = Callable[[str, dict[str, Any]], None]
"""Called with a command's name and its progress, about once a second."""


Follow = Callable[["SparkSession", "Run", Record, Callable[["StreamProgress"], None]], "StreamProgress"]
Reached = Callable[["StreamProgress"], bool]


def _silent(command: str, progress: dict[str, Any]) -> None:
    return None


def preflight(pipeline: Pipeline) -> dict[str, Any]:
    """Check everything, change nothing.

    :raises CdcError: the first finding that stands in the way.
    """
    with noting_errors(pipeline, "preflight"):
        findings = checks.preflight(pipeline)
        require(findings)
    return {"findings": [findings_dict(finding) for finding in findings]}


def findings_dict(finding: Finding) -> dict[str, Any]:
    """A finding as JSON values."""
    solution = {"solution": finding.error.solution} if finding.error else {}
    return {
        "check": finding.check,
        "ok": finding.ok,
        "warning": finding.warning,
        "message": finding.message,
        **solution,
    }


def provision(pipeline: Pipeline, takeover: bool = False) -> dict[str, Any]:
    """Create, or verify, publication, slot, target tables, plan and commit record; take the epoch of a run.

    While a stream lives, tables that the file has gained are left to it, and nothing else is done: ``requested`` is
    then the name of the request.

    :param takeover: go on although another run is alive.
    """
    with noting_errors(pipeline, PROVISION):
        return _provision(pipeline, takeover)


def _provision(pipeline: Pipeline, takeover: bool) -> dict[str, Any]:
    if pipeline.topics is not None:
        from airflow_cdc_provider.engine.sources.kafka import provisioning as topics

        return _provisioned(topics.provision(pipeline, takeover))
    requested = None
    if not takeover and _streaming(State(pipeline.state)):
        joining = _joining(pipeline)
        if joining:
            requested = resnapshot(pipeline, tables=joining)["requested"]
    if requested is None:
        record, found = provisioning.provision(pipeline, takeover)
    else:
        record = existing_record(pipeline)
        with connected(pipeline.source.dsn) as source:
            found = gate(source, pipeline.source, record).slot
    return _provisioned(record) | {"requested": requested, **found.as_dict()}


def _provisioned(record: Record) -> dict[str, Any]:
    return {
        "epoch": record.epoch,
        "applied_lsn": format_lsn(record.applied),
        "tables": [target.table.label for target in record.targets],
        "chunks": len(record.chunks),
        "requested": None,
    }


def _streaming(state: State) -> bool:
    return any(beat.alive and beat.part == STREAM for beat in read_heartbeats(state))


def _joining(pipeline: Pipeline) -> list[str]:
    """Tables that the file has and a sink's record has not."""
    records = [sink_of(branch).record() for branch in pipeline.branches]
    recorded = [{target.table.label for target in record.targets} for record in records if record is not None]
    if len(recorded) < len(records):
        return []  # a sink joins, which no live stream can do for it
    with connected(pipeline.source.dsn) as source:
        tables = resolve(source, pipeline.source.tables)
    return [table.label for table in tables if not all(table.label in labels for labels in recorded)]


def unfinished(pipeline: Pipeline) -> list[dict[str, Any]]:
    """The chunks that have not been committed, with their bounds as humans read them."""
    chunks = ((c, c.shown_bounds) for c in existing_record(pipeline).unfinished)
    return [{"table": c.table, "index": c.index, "lower": lower, "upper": upper} for c, (lower, upper) in chunks]


def snapshot(
    pipeline: Pipeline,
    *,
    epoch: int | None = None,
    chunks: Sequence[Range] | None = None,
    takeover: bool = False,
    report: Report = _silent,
) -> dict[str, Any]:
    """Copy chunks until all are finished.

    :param epoch: of the run that this is a part of; ``None`` for a run of its own.
    :param chunks: only these; ``None`` for all.
    """
    from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import (
        SnapshotProgress,
        choose_chunks,
        copy_chunks,
    )
    from airflow_cdc_provider.engine.spark.session import outliving

    part, nothing = part_of(chunks), {"chunks": 0, "finished": 0, "rows": 0, "seconds": 0.0}
    if not choose_chunks(existing_record(pipeline), chunks):
        with run_part(pipeline, part, epoch, takeover):
            return nothing
    with run_with_spark(pipeline, part, epoch, takeover) as (run, record, spark):
        chosen = choose_chunks(record, chunks)
        ours = frozenset(chosen)
        if not chosen:
            return nothing
        write_ledger(pipeline, run.state, record)
        done = SnapshotProgress(len(chosen))

        def attempt(record: Record) -> None:
            nonlocal done
            copied = [c for c in record.chunks if c.chunk in ours and c.watermark is not None]
            finished = frozenset((c.chunk.table, c.chunk.index) for c in copied)
            before = done = SnapshotProgress(len(chosen), finished, sum(c.rows for c in copied), done.seconds)

            def tell(progress: SnapshotProgress) -> None:
                nonlocal done
                done = before.plus(progress)
                run.progress = done.as_dict()
                report("snapshot", run.progress)

            with outliving(spark, lambda: run.stopping):
                copy_chunks(spark, run, record, choose_chunks(record, chunks), tell)

        keep_trying(run, record, attempt)
        write_ledger(pipeline, run.state, existing_record(pipeline))
        return {name: done.as_dict()[name] for name in ("chunks", "finished", "rows", "seconds", "rows_per_second")}


def stream(
    pipeline: Pipeline,
    *,
    until: str = "forever",
    epoch: int | None = None,
    takeover: bool = False,
    report: Report = _silent,
) -> dict[str, Any]:
    """Follow the log.

    :param until: ``forever``, ``caught-up`` (everything committed before this command began, and H, is durable in the
        sink) or ``lsn:X/Y``; see :meth:`.Ending.parse`.
    """
    from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamProgress
    from airflow_cdc_provider.engine.spark.session import outliving

    ending = Ending.parse(until)
    with run_with_spark(pipeline, STREAM, epoch, takeover) as (run, record, spark):
        require_copied(pipeline, record)
        follow, reached = _follower(pipeline, record, ending)
        done = StreamProgress(record.applied)

        def attempt(record: Record) -> None:
            before = done

            def tell(progress: StreamProgress) -> None:
                nonlocal done
                done = before.plus(progress)
                run.progress = done.as_dict()
                report("stream", run.progress)

            with outliving(spark, lambda: run.stopping):
                follow(spark, run, record, tell)

        keep_trying(run, record, attempt)
        told = done.as_dict() | run.lag.as_dict()
        names = ("applied_lsn", "changes", "tables", "lag_bytes", "lag_seconds")
        return {name: told[name] for name in names} | {"caught_up": reached(done)}


def _follower(pipeline: Pipeline, record: Record, ending: Ending) -> tuple[Follow, Reached]:
    """Return what follows the source until its end is reached, and what tells whether it has been."""
    if pipeline.topics is not None:
        from airflow_cdc_provider.engine.sources.kafka.stream_job import follower

        return follower(pipeline, ending.lsn, ending.caught_up)
    from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob

    target = ending.lsn
    if ending.caught_up:
        with connected(pipeline.source.dsn, settings={"synchronous_commit": "local"}) as source:
            target = max(slot.emit_marker(source, "caught-up"), record.high)
    return (
        lambda spark, run, record, tell: StreamJob(spark, run, record, tell).follow(target),
        lambda done: target is not None and done.applied >= target,
    )


def run(pipeline: Pipeline, *, takeover: bool = False, report: Report = _silent) -> dict[str, Any]:
    """Provision, snapshot, stream until caught up; with ``snapshot.mode: only``, remove the slot then."""
    if pipeline.snapshot.mode == "only" and _finished_for_good(pipeline):
        return {"snapshot": None, "stream": None}
    with spark_before(pipeline, PROVISION, "run", lambda: _check_run(pipeline, takeover)):
        return _run(pipeline, takeover, report)


def _check_run(pipeline: Pipeline, takeover: bool) -> None:
    """Check what :func:`run` is refused for, before Spark is started for it."""
    require(checks.preflight(pipeline))
    asks = pipeline.topics is None and not takeover and _streaming(State(pipeline.state)) and _joining(pipeline)
    if not asks:  # else tables that have joined are left to the stream
        _refuse_second(pipeline, takeover)


def _refuse_second(pipeline: Pipeline, takeover: bool) -> None:
    record = record_if_any(pipeline)
    refuse_second_writer(State(pipeline.state), record.epoch if record else 0, None, takeover)


def _run(pipeline: Pipeline, takeover: bool, report: Report) -> dict[str, Any]:
    provisioned = provision(pipeline, takeover)
    epoch = int(provisioned["epoch"])
    copied = snapshot(pipeline, epoch=epoch, takeover=takeover, report=report)
    record = existing_record(pipeline)
    if record.unfinished:  # asked to stop
        return {"snapshot": copied, "stream": None}
    streamed = stream(pipeline, until="caught-up", epoch=epoch, takeover=takeover, report=report)
    if pipeline.snapshot.mode == "only" and streamed["caught_up"]:
        with connected(pipeline.source.dsn, writes=True) as source:
            removal.remove_slot(source, pipeline, record, State(pipeline.state))
    return {"snapshot": copied, "stream": streamed}


def _finished_for_good(pipeline: Pipeline) -> bool:
    """Whether a copy without a stream is complete: consistent, and its slot removed."""
    record = commit_record_of(pipeline).record()
    if record is None or not record.consistent:
        return False
    with connected(pipeline.source.dsn) as source:
        return slot.read_slot(source, record.identity["slot"]) is None


def stop(pipeline: Pipeline) -> dict[str, Any]:
    """Ask the running job to end after its current unit."""
    return {"asked": request_stop(State(pipeline.state))}


def skip(
    pipeline: Pipeline, topic: str, partition: int, offsets: Sequence[tuple[int, int]], *, takeover: bool = False
) -> dict[str, Any]:
    """Pass over messages of a topic that stop the pipeline; the sinks' records note them.

    :param offsets: ranges, of which the first and the last one are included.
    :raises ConfigError: when the pipeline reads tables, or a message has been read or is not there.
    """
    if pipeline.topics is None:
        raise ConfigError(
            f"skip passes over messages of topics, and pipeline {pipeline.name!r} reads tables",
            "To go on without a change of the log, run `airflow-cdc resnapshot --all`.",
        )
    from airflow_cdc_provider.engine.sources.kafka import provisioning as topics
    from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip

    skips = [Skip(topic, partition, first, last, "passed over by hand") for first, last in offsets]
    record = topics.skip(pipeline, skips, takeover)
    return {"epoch": record.epoch, "skipped": record.identity["skipped"]}


def status(pipeline: Pipeline) -> dict[str, Any]:
    """Where the pipeline is. While a job lives, a server that cannot be reached is a part of the answer.

    :raises ConnectionFailed: when a server cannot be reached and no job lives.
    """
    state = State(pipeline.state)
    all_beats = read_heartbeats(state)
    beats = [beat for beat in all_beats if beat.alive]
    unreachable: dict[str, Any] = {}
    record: Record | None = None
    records: dict[str, Record | None] = {}
    found: slot.SlotState | None = None
    lag_bytes = lag_seconds = None
    for branch in pipeline.branches:
        place = branch.sink.place
        try:
            records[place] = sink_of(branch).record()
        except ConnectionFailed as e:
            unreachable["sink" if len(pipeline.sinks) == 1 else f"sink {place}"] = e
    known = [record for record in records.values() if record is not None]
    if len(known) == len(pipeline.sinks):
        record = merged(known)
    topics: dict[str, Any] = {}
    trouble: CdcError | None = None
    try:
        if pipeline.topics is not None:
            topics = _topics_status(pipeline, record)
            trouble = None if beats else source_trouble(pipeline, None, known)
        else:
            with connected(pipeline.source.dsn) as source:
                found = slot.read_slot(source, pipeline.source.slot)
                if record is not None:
                    lag_bytes, lag_seconds = _lag(source, record)
                trouble = None if beats else source_trouble(pipeline, source, known)  # a job passes the gate itself
    except ConnectionFailed as e:
        unreachable["source"] = e
    if unreachable and not beats:
        raise next(iter(unreachable.values()))
    if lag_seconds is not None:  # a live stream knows whether there is anything to apply
        told = (beat.progress.get("lag_seconds") for beat in beats if beat.part == STREAM)
        lag_seconds = next((seconds for seconds in told if seconds is not None), lag_seconds)
    converting = _converting(pipeline)
    restart = next((beat.progress["restart"] for beat in beats if "restart" in beat.progress), None)
    error = restart["error"] if restart else last_error(state)
    attention = trouble.as_dict() if trouble is not None else trouble_in_state(state, all_beats)
    condition = _condition(record, beats, restart, bool(starting(state, all_beats)), attention is not None)
    return {
        "pipeline": pipeline.name,
        "state": condition,
        "attention": attention if condition == NEEDED else None,
        "epoch": record.epoch if record else next((beat.epoch for beat in beats), None),
        "consistent": record.consistent if record else False,
        "applied_lsn": format_lsn(record.applied) if record else None,
        "lag_bytes": lag_bytes,
        "lag_seconds": lag_seconds,
        "slot": found.as_dict() | {"budget": _budget(pipeline, found)} if found else None,
        "sinks": [
            {
                "sink": place,
                "applied_lsn": format_lsn(each.applied) if each else None,
                "consistent": each.consistent if each else False,
                "converts": place in converting,
            }
            for place, each in records.items()
        ],
        "tables": _tables(record, beats) if record else [],
        "jobs": [{"part": beat.part, "epoch": beat.epoch, **beat.progress} for beat in beats],
        "restart": restart,
        "waiting": next((beat.progress["waiting"] for beat in beats if "waiting" in beat.progress), None),
        "unreachable": {server: e.message for server, e in unreachable.items()},
        "last_error": error,
        **topics,
    }


_READ: dict[str, Any] = {"offsets": {}, "skipped": []}
"""What a commit record says of topics, with what it says when there is none."""


def _topics_status(pipeline: Pipeline, record: Record | None) -> dict[str, Any]:
    from airflow_cdc_provider.engine.sources.kafka.gate import lag_of

    read = {name: record.identity.get(name, default) if record else default for name, default in _READ.items()}
    return {**read, **lag_of(pipeline, record)}


def _tables(record: Record, beats: Sequence[Heartbeat]) -> list[dict[str, Any]]:
    ranges = [c for c in record.chunks if c.keys is None]
    planned = {(c.chunk.table, c.chunk.index): (c.watermark is not None, c.rows) for c in ranges}
    return chunk_grid(planned, [beat for beat in beats if beat.epoch >= record.epoch])


def _budget(pipeline: Pipeline, found: slot.SlotState) -> dict[str, Any]:
    budget = budget_of(pipeline)
    return {"max_retained_bytes": budget.limit, "action": budget.action, "level": budget.level(found.retained)}


def _condition(
    record: Record | None, beats: Sequence[Heartbeat], restart: dict[str, Any] | None, begins: bool, trouble: bool
) -> str:
    if restart:
        return "restarting"
    if beats:
        return "streaming" if STREAM in [beat.part for beat in beats] else "snapshotting"
    if begins:
        return STARTING
    if trouble:
        return NEEDED
    return "new" if record is None else "stopped"


def _lag(source: Connection, record: Record) -> tuple[int, float]:
    return record.lag(slot.flushed(source), time.time())


class _LiveStream:
    """A stream that another process runs, seen through the sink's record."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def passed(self, lsn: int, timeout: float) -> bool:
        return await_condition(lambda: existing_record(self._pipeline).applied >= lsn, timeout)


def verify(pipeline: Pipeline, *, report: Report = _silent) -> dict[str, Any]:
    """Compare source and sink, table by table."""
    with noting_errors(pipeline, "verify", ends_run=False):
        return _verify(pipeline, report)


def _verify(pipeline: Pipeline, report: Report) -> dict[str, Any]:
    record, live = existing_record(pipeline), _streaming(State(pipeline.state))
    results: list[dict[str, Any]] = []
    not_compared: set[str] = set()

    def tell(table: str, done: int, total: int) -> None:
        report("verify", {"table": table, "done": done, "total": total})

    if pipeline.topics is not None:
        from airflow_cdc_provider.engine.sources.kafka.verify import verify as verify_topics

        return verify_topics(pipeline, live, tell) | {"converting": _converting(pipeline)}
    with connected(pipeline.source.dsn) as source:
        lag, _ = _lag(source, record)
        for branch in pipeline.branches:
            targets = existing_record(branch).targets
            compared = [t for t in targets if t.table.key or branch.sink.mode == "mirror"]
            not_compared |= {t.table.label for t in targets} - {t.table.label for t in compared}
            sink = sink_of(branch)
            found = compare(source, compared, sink.compared, _LiveStream(branch) if live else None, tell)
            place = {"sink": branch.sink.place} if len(pipeline.sinks) > 1 else {}
            results += [
                one.as_dict() | ranges_in(sink, target) | place for one, target in zip(found, compared, strict=True)
            ]
    return {
        "equal": all(result["equal"] for result in results),
        "tables": results,
        "live": live,
        "lag_bytes": lag,
        "not_compared": sorted(not_compared),
        "converting": _converting(pipeline),
    }


def _converting(pipeline: Pipeline) -> list[str]:
    """The sinks whose target tables need not keep the source's values, since the file says so."""
    return [sink.place for sink in pipeline.sinks if getattr(sink, "types", "keep") == "convert"]


def maintain(pipeline: Pipeline, retention: float | None = None) -> dict[str, Any]:
    """Tidy the stores of those sinks that need it; the pipeline's jobs may go on meanwhile.

    :param retention: seconds that replaced files stay, for readers; each store's own by default.
    """
    with noting_errors(pipeline, "maintain", ends_run=False):
        return {
            "sinks": [
                {"sink": sink.place, "done": list(sink.maintain(pipeline.name, retention))}
                for sink in pipeline.sinks
                if isinstance(sink, Maintained)
            ]
        }


def resnapshot(
    pipeline: Pipeline,
    *,
    tables: Sequence[str] = (),
    everything: bool = False,
    where: str | None = None,
    takeover: bool = False,
    request: str | None = None,
    report: Report = _silent,
) -> dict[str, Any]:
    """Read tables again, as they are defined now: the live stream does it between two units, or else this command.

    A table that the file has gained joins the pipeline so.

    :param everything: recreate publication and slot too, and read all tables: the repair for a lost slot.
    :param where: read only rows that match on either side.
    :param request: the name of the request that is left for a live stream, see :func:`.requests.new_name`.
    :returns: either the name of the ``requested``, or the ``rows``, and how many of each of the ``tables``.
    """
    _refuse_topics(pipeline, "resnapshot")
    if everything == bool(tables) or (everything and where):
        raise ConfigError("resnapshot takes either --table (with --where if wanted) or --all", "Give one of the two.")
    with noting_errors(pipeline, RESNAPSHOT, ends_run=everything):
        return _resnapshot(pipeline, tables, everything, where, takeover, request, report)


def _resnapshot(
    pipeline: Pipeline,
    tables: Sequence[str],
    everything: bool,
    where: str | None,
    takeover: bool,
    request: str | None,
    report: Report,
) -> dict[str, Any]:
    if everything:
        with spark_before(pipeline, RESNAPSHOT, RESNAPSHOT, lambda: _refuse_second(pipeline, takeover)):
            epoch = int(start_over(pipeline, takeover=takeover)["epoch"])
            copied = snapshot(pipeline, epoch=epoch, takeover=takeover, report=report)
        read = {c.chunk.table: c.rows for c in existing_record(pipeline).chunks}
        return {"requested": None, "rows": copied["rows"], "tables": read}
    state, record = State(pipeline.state), existing_record(pipeline)
    if not {target.table.label for target in record.targets}.issuperset(tables):
        require(checks.preflight(pipeline))
    for branch in pipeline.branches:
        for label in tables:
            reread.check(branch, existing_record(branch), label, where)
    if _streaming(state) and not takeover:
        name = requests.request(pipeline, list(tables), where, request)
        return {"requested": name, "rows": None, "tables": {}}
    rehearse(pipeline, RESNAPSHOT, takeover)
    with run_part(pipeline, RESNAPSHOT, None, takeover) as (run, record):
        written: dict[str, int] = {}
        for each in run.branches:
            barriers = Barriers(PATIENCE_SECONDS)
            for label in tables:
                written[label] = max(written.get(label, 0), reread.read_again(each, label, barriers, where))
    return {"requested": None, "rows": sum(written.values()), "tables": written}


def start_over(pipeline: Pipeline, *, takeover: bool = False) -> dict[str, Any]:
    """Recreate publication and slot, and plan all tables to be read again; a snapshot under the epoch reads them."""
    _refuse_topics(pipeline, "resnapshot")
    with noting_errors(pipeline, PROVISION):
        epoch = provisioning.start_over(pipeline, takeover)
    record = existing_record(pipeline)
    return {
        "epoch": epoch,
        "tables": [target.table.label for target in record.targets],
        "chunks": len(record.unfinished),
    }


def _refuse_topics(pipeline: Pipeline, command: str) -> None:
    """Refuse what needs tables at the source.

    :raises ConfigError: when the pipeline reads topics.
    """
    if pipeline.topics is not None:
        raise ConfigError(
            f"{command} reads tables of the source, and pipeline {pipeline.name!r} reads topics of Kafka",
            "To read the topics again from their beginning, run `airflow-cdc drop`, empty or drop the target tables,"
            " then `airflow-cdc run`.",
        )


def drop(pipeline: Pipeline, *, takeover: bool = False, source_gone: bool = False) -> dict[str, Any]:
    """Remove slot, publication, state, sink record and staging; never target tables.

    :param source_gone: go on if the source cannot be reached; ``left`` has the SQL that removes what is left there.
    """
    return {"dropped": pipeline.name, "left": removal.remove(pipeline, takeover, source_gone)}
