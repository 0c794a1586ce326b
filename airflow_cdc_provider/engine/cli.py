"""``airflow-cdc``: the command line of a pipeline.

For people by default: sentences, tables, a line of progress on long work. With
``--json`` one object on standard output and everything else on standard error.
Exit codes are those of :class:`.errors.ExitCode`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from airflow_cdc_provider import __version__
from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.drivers import driver_failure
from airflow_cdc_provider.engine.errors import CdcError, ConfigError, ExitCode, StreamFailed
from airflow_cdc_provider.engine.groups import Range, parse_chunks
from airflow_cdc_provider.engine.preflight import preflight
from airflow_cdc_provider.engine.run import record_error
from airflow_cdc_provider.engine.section import as_seconds
from airflow_cdc_provider.engine.state import State
from airflow_cdc_provider.engine.submission import check_wanted, end_ours
from airflow_cdc_provider.engine.table import human_bytes, text_table

Handler = Callable[[Pipeline, argparse.Namespace, commands.Report], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        check_wanted()
        pipeline = Pipeline.load(options.pipeline)
        result = _guarded(pipeline, options)
    except CdcError as e:
        end_ours(int(e.exit_code), None, e)
        if options.json:
            print(json.dumps({"error": e.as_dict()}))
        else:
            print(f"{options.command}: {e.message}\n{e.solution}", file=sys.stderr)
        return int(e.exit_code)
    end_ours(int(ExitCode.DONE), result, None)
    if options.json:
        print(json.dumps(result))
    else:
        print(_HUMAN.get(options.command, _plain)(result))
    if options.command == "verify" and not result["equal"]:
        return int(ExitCode.DIFFERENT)
    return int(ExitCode.DONE)


def _guarded(pipeline: Pipeline, options: argparse.Namespace) -> dict[str, Any]:
    try:
        return _HANDLERS[options.command](pipeline, options, _Progress(options.json))
    except CdcError:
        raise
    except KeyboardInterrupt:  # before or between the parts that stop gracefully
        raise StreamFailed("interrupted", "Start again: what has been committed stays.") from None
    except Exception as e:
        error = driver_failure(e, options.command)
        with contextlib.suppress(CdcError):
            record_error(State(pipeline.state), options.command, error)
        raise error from e


class _Progress:
    """Shows progress: one line that is rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self, json_output: bool) -> None:
        self._terminal = sys.stderr.isatty() and not json_output
        self._last = ""

    def __call__(self, command: str, progress: dict[str, Any]) -> None:
        line = _progress_line(command, progress)
        if line == self._last:
            return
        self._last = line
        print(f"\r\x1b[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()


def _progress_line(command: str, progress: dict[str, Any]) -> str:
    if command == "snapshot":
        done, total = progress["finished"], progress["chunks"]
        bar = ("█" * round(20 * done / max(1, total))).ljust(20, "░")
        speed = f"{progress['rows']:,} rows, {progress['rows_per_second']:,} rows/s"
        return f"snapshot {bar} {done}/{total} chunks, {speed}"
    if command == "stream":
        return f"stream applied {progress['applied_lsn']}, {progress['changes']:,} changes"
    return f"{command} {progress['table']} {progress['done']}/{progress['total']}"


def _preflight(pipeline: Pipeline, options: argparse.Namespace, report: commands.Report) -> dict[str, Any]:
    findings = preflight(pipeline)
    if not options.json:
        for finding in findings:
            mark = "!" if finding.warning else "✓" if finding.ok else "✗"
            remedy = f" {finding.error.solution}" if finding.error else ""
            print(f"{mark} {finding.message}{remedy}")
    for finding in findings:
        if finding.error is not None:
            raise finding.error
    if not options.no_spark:
        from airflow_cdc_provider.engine.session import spark_session

        with spark_session(pipeline, "preflight"):
            pass
    return {"findings": [commands.findings_dict(finding) for finding in findings]}


def _chunks(text: str) -> tuple[Range, ...]:
    try:
        return parse_chunks(text)
    except ConfigError as e:
        raise argparse.ArgumentTypeError(f"{e.message}. {e.solution}") from e


def _duration(text: str) -> float:
    try:
        return as_seconds(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid. Give {e}.") from e


def _drop(pipeline: Pipeline, options: argparse.Namespace, report: commands.Report) -> dict[str, Any]:
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError("drop needs a confirmation", "Add --yes.")
        answer = input(f"Remove slot, publication, state and sink record of {pipeline.name}? Type its name: ")
        if answer.strip() != pipeline.name:
            raise ConfigError("drop was not confirmed", "Type the pipeline's name, or add --yes.")
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
    "maintain": lambda p, o, r: commands.maintain(p, o.retention),
    "drop": _drop,
    "resnapshot": lambda p, o, r: commands.resnapshot(
        p, tables=o.table or (), everything=o.all, where=o.where, takeover=o.takeover, report=r
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="airflow-cdc", description="Change data capture from Postgres on Spark.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *, writes: bool = True) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.add_argument("--pipeline", required=True, metavar="FILE", help="the pipeline file")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        if writes:
            sub.add_argument("--takeover", action="store_true", help="go on although another run is alive")
        return sub

    preflight_ = command("preflight", "Check everything, change nothing.", writes=False)
    preflight_.add_argument("--no-spark", action="store_true", help="do not start Spark to check its executors")
    command("provision", "Create or verify publication, slot, plan and sink record.")
    snapshot = command("snapshot", "Work on chunks until all are finished.")
    snapshot.add_argument(
        "--chunks", type=_chunks, metavar="JSON", help='only these chunks: [["public.orders", first index, last], ...]'
    )
    stream = command("stream", "Follow the log.")
    stream.add_argument(
        "--until",
        default="stopped",
        metavar="stopped|caught-up|lsn:X/Y",
        help="end when stopped (default), when everything committed until now is applied, or at a position",
    )
    for part in (snapshot, stream):
        part.add_argument("--epoch", type=int, help="the epoch of the run that this is a part of")
    command("run", "Provision, snapshot, stream until caught up.")
    command("stop", "Ask the running job to end after its current unit.", writes=False)
    command("status", "Show where the pipeline is.", writes=False)
    command("verify", "Compare source and sink.", writes=False)
    maintain = command("maintain", "Join the small files of sinks that have such, remove replaced ones.", writes=False)
    maintain.add_argument(
        "--retention", type=_duration, metavar="DURATION", help="how long replaced files stay, such as '8h'"
    )
    drop = command("drop", "Remove slot, publication, state and sink record, never target tables.")
    drop.add_argument("--yes", action="store_true", help="do not ask")
    drop.add_argument("--source-gone", action="store_true", help="go on if the source cannot be reached")
    resnapshot = command("resnapshot", "Read tables again.")
    resnapshot.add_argument("--table", action="append", metavar="SCHEMA.TABLE", help="a table; may be repeated")
    resnapshot.add_argument("--all", action="store_true", help="all tables, with a new slot and publication")
    resnapshot.add_argument("--where", metavar="SQL", help="only rows that match on either side")
    return parser


def _plain(result: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in result.items() if not isinstance(value, list | dict))


def _status(result: dict[str, Any]) -> str:
    slot = result["slot"]
    lines = [
        f"pipeline {result['pipeline']}: {result['state']}, {'' if result['consistent'] else 'not yet '}consistent"
    ]
    if any(server.startswith("sink") for server in result["unreachable"]):
        lines = [f"pipeline {result['pipeline']}: {result['state']}"]
    if result["restart"]:
        lines.append(f"restart  {_restart(result['restart'])}")
    if result["waiting"]:
        lines.append(f"waiting  {result['waiting']}")
    lines += [f"{server:8} {message}" for server, message in result["unreachable"].items()]
    if result["applied_lsn"]:
        behind = result["lag_bytes"] is not None
        lag = f", lag {human_bytes(result['lag_bytes'])}, {result['lag_seconds']} s" if behind else ""
        lines.append(f"applied  {result['applied_lsn']}{lag}")
        if "offsets" in result:
            lines[-1] += f", {result['lag_messages']:,} messages behind"
        elif not slot and "source" not in result["unreachable"]:
            lines.append("slot     none on the source")
    if len(result["sinks"]) > 1:
        lines += [f"sink     {sink['sink']}: applied {sink['applied_lsn']}" for sink in result["sinks"]]
    if slot:
        lines.append(
            f"slot     restart_lsn {slot['restart_lsn']}, confirmed_flush_lsn {slot['confirmed_flush_lsn']},"
            f" retains {human_bytes(slot['retained_bytes'])} of {human_bytes(slot['budget']['max_retained_bytes'])}"
            f"{_LEVELS[slot['budget']['level']]}, {slot['wal_status']}"
        )
    if result["last_error"]:
        lines.append(f"error    {result['last_error']['message']} {result['last_error']['solution']}")
    chunks = [[t["table"], f"{t['finished']}/{t['chunks']}", f"{t['rows']:,}"] for t in result["tables"]]
    return "\n".join([*lines, text_table(["table", "chunks", "rows"], chunks)])


_LEVELS = {"ok": "", "warning": " (close to the budget)", "exceeded": " (beyond the budget)"}


def _restart(restart: dict[str, Any]) -> str:
    wait = max(0, math.ceil(restart["next_attempt_at"] - time.time()))
    return f"attempt {restart['attempt']} of {restart['of']} {f'in {wait} s' if wait else 'now'}"


def _named(table: dict[str, Any]) -> str:
    """A compared table, with its sink where there are several."""
    return f"{table['table']} in {table['sink']}" if "sink" in table else str(table["table"])


def _verify(result: dict[str, Any]) -> str:
    table = text_table(
        ["table", "source rows", "target rows", "equal"],
        [
            [_named(t), f"{t['source_rows']:,}", f"{t['target_rows']:,}", "yes" if t["equal"] else "NO"]
            for t in result["tables"]
        ],
    )
    lines = [
        f"{_named(t)}: {d['kind']} {json.dumps(d['key'], ensure_ascii=False)}"
        for t in result["tables"]
        for d in t["differences"]
    ]
    if result["not_compared"]:
        lines.append(f"Not compared, as changelogs without a key: {', '.join(result['not_compared'])}.")
    if not result["equal"] and not result["live"] and result["lag_bytes"]:
        lines.append(f"No stream is running, and {human_bytes(result['lag_bytes'])} of log have not been applied.")
    return "\n".join([table, *lines])


def _provision(result: dict[str, Any]) -> str:
    if result["requested"]:
        return "The running stream has been asked to take the new tables in."
    return (
        f"{len(result['tables'])} tables in {result['chunks']} chunks, epoch {result['epoch']},"
        f" applied {result['applied_lsn']}"
    )


def _run(result: dict[str, Any]) -> str:
    copied, streamed = result["snapshot"], result["stream"]
    if copied is None:
        return "Nothing to do: the copy is complete."
    if streamed is None:
        return f"Stopped after {copied['finished']} of {copied['chunks']} chunks."
    caught_up = "caught up" if streamed["caught_up"] else "stopped"
    return (
        f"{copied['rows']:,} rows copied, {streamed['changes']:,} changes applied,"
        f" {caught_up} at {streamed['applied_lsn']}"
    )


def _maintain(result: dict[str, Any]) -> str:
    lines = [f"{sink['sink']}: {_plain(done)}" for sink in result["sinks"] for done in sink["done"]]
    return "\n".join(lines) or "No sink of the pipeline needs it."


_HUMAN: dict[str, Callable[[dict[str, Any]], str]] = {
    "run": _run,
    "status": _status,
    "verify": _verify,
    "provision": _provision,
    "maintain": _maintain,
    "preflight": lambda result: f"All {len(result['findings'])} checks passed.",
    "stop": lambda result: f"Asked {', '.join(result['asked'])} to end." if result["asked"] else "Nothing is running.",
}
