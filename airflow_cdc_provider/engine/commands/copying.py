"""``snapshot``: copies chunks until all are finished."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from airflow_cdc_provider.engine.commands.report import Report, silent
from airflow_cdc_provider.engine.commands.run_start import needs_spark, reporting_jvm_end, started_run
from airflow_cdc_provider.engine.core.chunk_ranges import Range, choose_chunks, part_of
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.workload import Workload
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.progress import SnapshotProgress
from airflow_cdc_provider.engine.runs.record_copy import write_record_copy
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.contract import source_of


def unfinished(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return the chunks that have not been committed, with their bounds for humans."""
    chunks = ((c, c.shown_bounds) for c in existing_record(pipeline).unfinished)
    return [{"table": c.table, "index": c.index, "lower": lower, "upper": upper} for c, (lower, upper) in chunks]


def copy_needs_spark(pipeline: Pipeline, chunks: Sequence[Range] | None = None) -> bool:
    """Return whether :func:`snapshot` starts Spark for the chunks that are not copied yet.

    :param chunks: ranges of the chunks to copy; ``None`` for all.
    """
    return needs_spark(pipeline, partial(_estimate, pipeline, chunks))


def _estimate(pipeline: Pipeline, chunks: Sequence[Range] | None, record: Record | None) -> Workload | None:
    return None if record is None else source_of(pipeline).workload(record, choose_chunks(record, chunks))


def snapshot(
    pipeline: Pipeline,
    *,
    epoch: int | None = None,
    chunks: Sequence[Range] | None = None,
    takeover: bool = False,
    spark: bool = True,
    report: Report = silent,
) -> dict[str, Any]:
    """Copy chunks until all are finished.

    :param epoch: the epoch of the run that this part belongs to; ``None`` to begin a run.
    :param chunks: ranges of the chunks to copy; ``None`` for all.
    :param spark: whether Spark may be started, see :func:`copy_needs_spark`.
    """
    part, nothing = part_of(chunks), {"chunks": 0, "finished": 0, "rows": 0, "seconds": 0.0}
    if not choose_chunks(existing_record(pipeline), chunks):
        with run_part(pipeline, part, epoch, takeover):
            return nothing
    needed = partial(copy_needs_spark, pipeline, chunks) if spark else lambda: False
    with started_run(pipeline, part, epoch, takeover, needed) as (run, record, session):
        chosen = choose_chunks(record, chunks)
        ours = frozenset(chosen)
        if not chosen:
            return nothing
        write_record_copy(pipeline, run.state, record)
        done = SnapshotProgress(len(chosen))

        def attempt(record: Record) -> None:
            nonlocal done
            copied = [c for c in record.chunks if c.chunk in ours and c.watermark is not None]
            finished = frozenset((c.chunk.table, c.chunk.index) for c in copied)
            before = done = SnapshotProgress(len(chosen), finished, sum(c.rows for c in copied), done.seconds)

            def report_progress(progress: SnapshotProgress) -> None:
                nonlocal done
                done = before.plus(progress)
                run.progress = done.as_dict()
                report("snapshot", run.progress)

            with reporting_jvm_end(session, run):
                source_of(pipeline).copy_chunks(session, run, record, choose_chunks(record, chunks), report_progress)

        keep_trying(run, record, attempt)
        write_record_copy(pipeline, run.state, existing_record(pipeline))
        return {name: done.as_dict()[name] for name in ("chunks", "finished", "rows", "seconds", "rows_per_second")}
