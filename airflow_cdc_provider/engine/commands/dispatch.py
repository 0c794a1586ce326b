"""The commands by name, for the command line, which imports this module once it handles signals."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.attention import NEEDED, noting_errors
from airflow_cdc_provider.engine.commands.checks import preflight, preflight_on
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, ExitCode, hide_values
from airflow_cdc_provider.engine.core.findings import Finding, require
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.driver_errors import driver_failure
from airflow_cdc_provider.engine.runs.run_errors import record_error
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.location import refuse_others
from airflow_cdc_provider.engine.state.submission import cause_of, check_wanted

Handler = Callable[[Pipeline, argparse.Namespace, commands.Report], dict[str, Any]]


def run_command(options: argparse.Namespace, report: commands.Report) -> tuple[ExitCode, dict[str, Any]]:
    """Run a command.

    :param options: the parsed options of the command line.
    :returns: its exit code and its result.
    :raises CdcError: if it fails.
    """
    check_wanted()
    if options.command == "init":
        return ExitCode.DONE, _init(options)
    pipeline = Pipeline.load(options.pipeline)
    if not pipeline.messages.values:
        hide_values()
    try:
        result = _HANDLERS[options.command](pipeline, options, report)
    except CdcError:
        raise
    except Exception as e:
        error = cause_of(driver_failure(e, options.command))
        with contextlib.suppress(CdcError):
            state = State(pipeline.state)
            refuse_others(state, pipeline.name)
            record_error(state, options.command, error)
        raise error from e
    if options.command == "verify" and not result["equal"]:
        return ExitCode.DIFFERENT, result
    if options.command == "status" and result["state"] == NEEDED:
        return ExitCode.FAILED, result
    return ExitCode.DONE, result


def _init(options: argparse.Namespace) -> dict[str, Any]:
    result, findings = commands.init(
        options.pipeline,
        source_conn_id=options.source_conn_id,
        sink_conn_id=options.sink_conn_id,
        tables=options.table or (),
        mode=options.mode,
        state=options.state,
    )
    _print(findings, options)
    return {**result, "findings": [commands.findings_dict(finding) for finding in findings]}


def _preflight(pipeline: Pipeline, options: argparse.Namespace, report: commands.Report) -> dict[str, Any]:
    with noting_errors(pipeline, "preflight"):
        findings = preflight(pipeline)
        _print(findings, options)
        require(findings)
        if not options.no_spark:
            from airflow_cdc_provider.engine.spark.session import spark_session

            with spark_session(pipeline.spark_start, "preflight") as spark:
                further = preflight_on(pipeline, spark)
            _print(further, options)
            require(further)
            findings += further
    return {"findings": [commands.findings_dict(finding) for finding in findings]}


def _print(findings: Sequence[Finding], options: argparse.Namespace) -> None:
    """Print findings for people."""
    if not options.json:
        for finding in findings:
            remedy = f" {finding.error.solution}" if finding.error else ""
            print(f"{finding.mark} {finding.message}{remedy}")


def _drop(pipeline: Pipeline, options: argparse.Namespace, report: commands.Report) -> dict[str, Any]:
    what = "Drop the tables of views that the file no longer has, in"
    if not options.views:
        what = "Remove slot, publication, state and commit record of"
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError("drop needs a confirmation", "Add --yes.")
        answer = input(f"{what} {pipeline.name}? Type its name: ")
        if answer.strip() != pipeline.name:
            raise ConfigError("drop was not confirmed", "Type the pipeline's name, or add --yes.")
    if options.views:
        return commands.drop_views(pipeline)
    return commands.drop(pipeline, takeover=options.takeover, source_gone=options.source_gone)


_HANDLERS: dict[str, Handler] = {
    "preflight": _preflight,
    "provision": lambda p, o, r: commands.provision(p, o.takeover),
    "snapshot": lambda p, o, r: commands.snapshot(p, epoch=o.epoch, chunks=o.chunks, takeover=o.takeover, report=r),
    "stream": lambda p, o, r: commands.stream(p, until=o.until, epoch=o.epoch, takeover=o.takeover, report=r),
    "run": lambda p, o, r: commands.run(p, takeover=o.takeover, report=r),
    "stop": lambda p, o, r: commands.stop(p),
    "status": lambda p, o, r: commands.status(p),
    "verify": lambda p, o, r: commands.verify(p, report=r),
    "explain": lambda p, o, r: commands.explain(p, o.view),
    "maintain": lambda p, o, r: commands.maintain(p, o.retention),
    "skip": lambda p, o, r: commands.skip(p, o.topic, o.partition, o.offset, takeover=o.takeover),
    "drop": _drop,
    "resnapshot": lambda p, o, r: commands.resnapshot(
        p, tables=o.table or (), everything=o.all, where=o.where, takeover=o.takeover, report=r
    ),
}
