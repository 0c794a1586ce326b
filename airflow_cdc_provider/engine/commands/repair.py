"""``resnapshot``: reads some tables again, or all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from airflow_cdc_provider.engine.commands import checks
from airflow_cdc_provider.engine.commands.attention import noting_errors
from airflow_cdc_provider.engine.commands.copying import snapshot
from airflow_cdc_provider.engine.commands.report import Report, silent
from airflow_cdc_provider.engine.commands.run_start import needs_spark, refuse_second, rehearse, spark_if_needed
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.findings import require
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.contract import Rereads, source_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import PROVISION, RESNAPSHOT, is_streaming


def resnapshot(
    pipeline: Pipeline,
    *,
    tables: Sequence[str] = (),
    everything: bool = False,
    where: str | None = None,
    takeover: bool = False,
    request: str | None = None,
    report: Report = silent,
) -> dict[str, Any]:
    """Read tables again, as they are defined now; a live stream does it between two units, otherwise this command.

    Tables that were added to the file join the pipeline in this way.

    :param everything: whether to recreate publication and slot, and read all tables: the repair for a lost slot.
    :param where: SQL condition; read only rows that match it on either side.
    :param request: the name of the request for a live stream, see :func:`.requests.new_name`.
    :returns: the name of the request as ``requested``; or the number of ``rows``, and those of each table as
        ``tables``.
    """
    rereads = source_of(pipeline).rereads("resnapshot")
    if everything == bool(tables) or (everything and where):
        raise ConfigError("resnapshot takes either --table (optionally with --where) or --all", "Give one of the two.")
    with noting_errors(pipeline, RESNAPSHOT, ends_run=everything):
        return _resnapshot(pipeline, rereads, tables, everything, where, takeover, request, report)


def _resnapshot(
    pipeline: Pipeline,
    rereads: Rereads,
    tables: Sequence[str],
    everything: bool,
    where: str | None,
    takeover: bool,
    request: str | None,
    report: Report,
) -> dict[str, Any]:
    if everything:
        check = partial(refuse_second, pipeline, takeover)
        needed = partial(needs_spark, pipeline, lambda _: source_of(pipeline).workload(None))
        with spark_if_needed(pipeline, RESNAPSHOT, RESNAPSHOT, check, needed):
            epoch = int(start_over(pipeline, takeover=takeover)["epoch"])
            copied = snapshot(pipeline, epoch=epoch, takeover=takeover, report=report)
        read = {c.chunk.table: c.rows for c in existing_record(pipeline).chunks}
        return {"requested": None, "rows": copied["rows"], "tables": read}
    state, record = State(pipeline.state), existing_record(pipeline)
    if not {target.table.label for target in record.targets}.issuperset(tables):
        require(checks.preflight(pipeline))
    rereads.check(tables, where)
    if is_streaming(state) and not takeover:
        return {"requested": rereads.request(tables, where, request), "rows": None, "tables": {}}
    rehearse(pipeline, RESNAPSHOT, takeover)
    with run_part(pipeline, RESNAPSHOT, None, takeover) as (run, _):
        written = rereads.read(run, tables, where)
    return {"requested": None, "rows": sum(written.values()), "tables": written}


def start_over(pipeline: Pipeline, *, takeover: bool = False) -> dict[str, Any]:
    """Recreate publication and slot, and plan to read all tables again; a snapshot under the epoch reads them."""
    rereads = source_of(pipeline).rereads("resnapshot")
    with noting_errors(pipeline, PROVISION):
        epoch = rereads.start_over(takeover)
    record = existing_record(pipeline)
    return {
        "epoch": epoch,
        "tables": [target.table.label for target in record.targets],
        "chunks": len(record.unfinished),
    }
