"""All checks of a pipeline that need no Spark and change nothing.

Each check results in one sentence, with a remedy if it fails. The checks continue after a failure as long as further
ones are meaningful. A user who sets up a source with the help of its administrator needs the whole list at once, not
one failure a day.
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
from airflow_cdc_provider.engine.postgres.driver_checks import convert_driver_errors
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.metrics import require_client
from airflow_cdc_provider.engine.runs.sink_checks import check_sinks
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.files import State, state_remedy
from airflow_cdc_provider.engine.state.location import require_own

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def preflight_on(pipeline: Pipeline, spark: SparkSession) -> list[Finding]:
    """Run the checks that need Spark, see :meth:`.Source.check_with_spark`."""
    return source_of(pipeline).check_with_spark(spark)


def preflight_whole(pipeline: Pipeline) -> list[Finding]:
    """Return the findings of :func:`preflight` and, if these allow a session, of :func:`preflight_on`."""
    findings = preflight(pipeline)
    if source_of(pipeline).checks_with_spark and all(finding.ok for finding in findings):
        from airflow_cdc_provider.engine.spark.session import spark_session

        with spark_session(pipeline.spark_start, "preflight") as spark:
            findings += preflight_on(pipeline, spark)
    return findings


def preflight(pipeline: Pipeline) -> list[Finding]:
    """Check source, tables, sinks and state of a pipeline without Spark and without changing anything.

    :returns: the findings in the order of the checks; pass them to :func:`.require` to continue only if all checks
        passed.
    """
    checks = Checks(convert_driver_errors)
    with source_of(pipeline).checking(checks) as found:
        provisioned = check_sinks(checks, pipeline, found.tables, found.identity)
        checks.run("state", partial(_state, pipeline))
        if pipeline.metrics.prometheus is not None:
            checks.run("metrics", partial(require_client, pipeline))
        if provisioned and found.require_continuation is not None:
            readers = [partial(existing_record, branch) for branch in provisioned]
            checks.run("continuation", partial(found.require_continuation, readers))
    return checks.findings


def _state(pipeline: Pipeline) -> str:
    """Check that the state directory can be created or written, without creating it, and is the pipeline's own."""
    url = pipeline.state
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            while not os.path.lexists(folder):
                folder = folder.parent
            # Create a file without a name. This is the only reliable test, because root passes all permission checks.
            with tempfile.TemporaryFile(dir=folder):
                pass
        else:
            _list_nearest(url)
    except Exception as e:  # object stores have their own exception classes
        raise StateUnwritable(f"state {url} cannot be written: {e}", state_remedy(getattr(e, "errno", None))) from e
    require_own(State(url), pipeline.name)
    return f"State {url} can be written."


def _list_nearest(url: str) -> None:
    """List the nearest parent folder that exists, up to the root or bucket.

    :raises FileNotFoundError: if even the root or bucket does not exist.
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
