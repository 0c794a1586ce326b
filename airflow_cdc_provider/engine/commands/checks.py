"""Everything about a pipeline that can be checked without Spark and without changing anything.

Each check is one sentence, with a remedy when it fails, and the checks go on after a failure wherever the next one
still means something: whoever sets up a source with the help of its administrator wants the whole list at once, not
one refusal a day.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import fsspec

from airflow_cdc_provider.engine.core.errors import StateUnwritable
from airflow_cdc_provider.engine.core.findings import Checks, Finding
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.driver_checks import driver_errors_told
from airflow_cdc_provider.engine.runs.metrics import require_client
from airflow_cdc_provider.engine.runs.sink_checks import check_sinks
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.files import State, state_remedy
from airflow_cdc_provider.engine.state.location import require_own

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def preflight_on(pipeline: Pipeline, spark: SparkSession) -> list[Finding]:
    """Check what Spark alone can tell, see :meth:`.Source.check_with_spark`."""
    return source_of(pipeline).check_with_spark(spark)


def preflight_whole(pipeline: Pipeline) -> list[Finding]:
    """Return what :func:`preflight` finds, and, if that lets a session begin, :func:`preflight_on`."""
    findings = preflight(pipeline)
    if source_of(pipeline).checks_with_spark and all(finding.ok for finding in findings):
        from airflow_cdc_provider.engine.spark.session import spark_session

        with spark_session(pipeline.spark_start, "preflight") as spark:
            findings += preflight_on(pipeline, spark)
    return findings


def preflight(pipeline: Pipeline) -> list[Finding]:
    """Check source, tables, sinks and state of a pipeline without Spark; changes nothing.

    :returns: the findings in the order of the checks; pass them to :func:`.require` to go on only if all is well.
    """
    checks = Checks(driver_errors_told)
    with source_of(pipeline).checking(checks) as found:
        records = check_sinks(checks, pipeline, found.tables, found.identity)
        checks.run("state", partial(_state, pipeline))
        if pipeline.metrics.prometheus is not None:
            checks.run("metrics", partial(require_client, pipeline))
        if records and found.require_continuation is not None:
            checks.run("continuation", partial(found.require_continuation, records))
    return checks.findings


def _state(pipeline: Pipeline) -> str:
    """Check that the state directory can be made or written, without making it, and is the pipeline's alone."""
    url = pipeline.state
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            while not os.path.lexists(folder):
                folder = folder.parent
            # A file without a name: the only sure test, since root passes every look at permissions.
            with tempfile.TemporaryFile(dir=folder):
                pass
        else:
            _list_nearest(url)
    except Exception as e:  # object stores raise classes of their own
        raise StateUnwritable(f"state {url} cannot be written: {e}", state_remedy(getattr(e, "errno", None))) from e
    require_own(State(url), pipeline.name)
    return f"State {url} can be written."


def _list_nearest(url: str) -> None:
    """List the nearest folder that exists, at the latest the root or bucket.

    :raises FileNotFoundError: when not even that exists.
    """
    system, path = fsspec.url_to_fs(url)
    while True:
        try:
            system.ls(path, detail=False)
            return
        except FileNotFoundError:
            parent = system._parent(path)
            if parent == path or not parent:  # a bucket has no parent
                raise
            path = parent
