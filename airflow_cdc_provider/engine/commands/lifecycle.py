"""Commands that check, stop, maintain and remove a pipeline."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from typing import Any

from airflow_cdc_provider.engine.commands import checks
from airflow_cdc_provider.engine.commands.attention import noting_errors
from airflow_cdc_provider.engine.core.findings import Finding, require
from airflow_cdc_provider.engine.pipeline.kinds import MaintainedSink
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.registry import sink_plugin
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.runs.run_errors import request_stop
from airflow_cdc_provider.engine.sinks.contract import KeepsViews
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.files import State


def preflight(pipeline: Pipeline) -> dict[str, Any]:
    """Check everything without changing anything.

    :raises CdcError: the error of the first check that failed.
    """
    with noting_errors(pipeline, "preflight"):
        findings = checks.preflight(pipeline)
        require(findings)
    return {"findings": [findings_dict(finding) for finding in findings]}


def findings_dict(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON values."""
    solution = {"solution": finding.error.solution} if finding.error else {}
    return {
        "check": finding.check,
        "ok": finding.ok,
        "warning": finding.warning,
        "message": finding.message,
        **solution,
    }


def stop(pipeline: Pipeline) -> dict[str, Any]:
    """Ask the running job to end after its current unit."""
    return {"asked": request_stop(State(pipeline.state), _user())}


def _user() -> str:
    """Return the name of the user on the command line; in a container, the id may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def skip(
    pipeline: Pipeline, topic: str, partition: int, offsets: Sequence[tuple[int, int]], *, takeover: bool = False
) -> dict[str, Any]:
    """Skip messages of a topic that stop the pipeline; the sinks' commit records store them.

    :param offsets: ranges of offsets, first and last included.
    :raises ConfigError: if the pipeline reads tables, or if a message has been read already or does not exist.
    """
    return dict(source_of(pipeline).skip(topic, partition, offsets, takeover))


def maintain(pipeline: Pipeline, retention: float | None = None) -> dict[str, Any]:
    """Maintain the stores of those sinks that need it; the pipeline's jobs may keep running.

    :param retention: seconds that replaced files are kept for readers; each store's own setting by default.
    """
    with noting_errors(pipeline, "maintain", ends_run=False):
        return {
            "sinks": [
                {"sink": sink.place, "done": list(plugin.maintain(sink, pipeline.name, retention))}
                for sink in pipeline.sinks
                for plugin in [sink_plugin(sink.type)]
                if isinstance(plugin, MaintainedSink)
            ]
        }


def drop(pipeline: Pipeline, *, takeover: bool = False, source_gone: bool = False) -> dict[str, Any]:
    """Remove slot, publication, state, commit record and staging, but no target tables and no views.

    :param source_gone: whether to continue if the source cannot be reached; the result's ``left`` then has the SQL that
        removes the leftover objects at the source.
    """
    return {"dropped": pipeline.name, "left": source_of(pipeline).remove(takeover, source_gone)}


def drop_views(pipeline: Pipeline) -> dict[str, Any]:
    """Remove the views that the file no longer has, with their tables; the pipeline and its jobs continue."""
    sinks = [sink_of(branch) for branch in pipeline.branches]
    return {"views": [label for sink in sinks if isinstance(sink, KeepsViews) for label in sink.drop_views()]}
