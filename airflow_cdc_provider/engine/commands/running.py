"""``run``: provision, snapshot and stream, one after the other."""

from __future__ import annotations

from functools import partial
from typing import Any

from airflow_cdc_provider.engine.commands import checks
from airflow_cdc_provider.engine.commands.copying import snapshot
from airflow_cdc_provider.engine.commands.following import stream
from airflow_cdc_provider.engine.commands.provisioning import provision
from airflow_cdc_provider.engine.commands.report import Report, silent
from airflow_cdc_provider.engine.commands.run_start import needs_spark, refuse_second, spark_if_needed
from airflow_cdc_provider.engine.core.chunk_ranges import choose_chunks
from airflow_cdc_provider.engine.core.findings import require
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.stream_end import CAUGHT_UP, Ending
from airflow_cdc_provider.engine.core.workload import Workload
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import commit_record_of, existing_record
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import PROVISION, is_streaming


def run(pipeline: Pipeline, *, takeover: bool = False, report: Report = silent) -> dict[str, Any]:
    """Provision, snapshot, and stream until caught up; with ``snapshot.mode: only``, remove the slot afterwards."""
    if pipeline.snapshot.mode == "only" and _finished_for_good(pipeline):
        return {"snapshot": None, "stream": None}
    check = partial(_check_run, pipeline, takeover)
    needed = partial(needs_spark, pipeline, partial(_estimate, pipeline))
    with spark_if_needed(pipeline, PROVISION, "run", check, needed):
        return _run(pipeline, takeover, report)


def _estimate(pipeline: Pipeline, record: Record | None) -> Workload | None:
    source = source_of(pipeline)
    if record is None or source.joining():
        return source.workload(None)
    return source.workload(record, choose_chunks(record), Ending.parse(CAUGHT_UP))


def _check_run(pipeline: Pipeline, takeover: bool) -> None:
    """Check whether :func:`run` would be refused, before Spark is started for it."""
    require(checks.preflight(pipeline))
    asks = not takeover and is_streaming(State(pipeline.state)) and source_of(pipeline).joining()
    if not asks:  # otherwise the running stream adds the new tables
        refuse_second(pipeline, takeover)


def _run(pipeline: Pipeline, takeover: bool, report: Report) -> dict[str, Any]:
    provisioned = provision(pipeline, takeover)
    epoch = int(provisioned["epoch"])
    copied = snapshot(pipeline, epoch=epoch, takeover=takeover, report=report)
    record = existing_record(pipeline)
    if record.unfinished:  # asked to stop
        return {"snapshot": copied, "stream": None}
    streamed = stream(pipeline, until="caught-up", epoch=epoch, takeover=takeover, report=report)
    if pipeline.snapshot.mode == "only" and streamed["caught_up"]:
        source_of(pipeline).release(record)
    return {"snapshot": copied, "stream": streamed}


def _finished_for_good(pipeline: Pipeline) -> bool:
    """Return whether a copy without a stream is complete, which means consistent and with its slot removed."""
    record = commit_record_of(pipeline).record()
    return record is not None and source_of(pipeline).is_finished(record)
