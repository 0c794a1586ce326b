"""``airflow-cdc``: the command line of a pipeline.

By default the output is for people: sentences, tables, and a progress line for long work. With ``--json`` there is one
object on standard output, and everything else on standard error. Exit codes are those of :class:`.errors.ExitCode`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from airflow_cdc_provider.engine.commands.arguments import parser
from airflow_cdc_provider.engine.commands.view_output import explanation_text, view_results_text, view_states_text
from airflow_cdc_provider.engine.core import signals
from airflow_cdc_provider.engine.core.errors import CdcError, ExitCode, Interrupted, values_hidden
from airflow_cdc_provider.engine.core.signals import SignalCame
from airflow_cdc_provider.engine.core.text_output import human_bytes, text_table

_LOGGED = ("SparkLost", "SparkUnusable", "StreamFailed")
"""The errors for which Spark's own log may have more information."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    name = next((each for each in given[:1] if not each.startswith("-")), "airflow-cdc")
    command: dict[str, Any] = {"name": name, "json": "--json" in given}  # a guess before the arguments are parsed

    def give_up(name: str) -> int:
        return _report_outcome(command["name"], command["json"], _interrupted(command["name"], name))

    with signals.listening(give_up):
        try:
            signals.arm()
            options = parser().parse_args(arguments)
            command |= {"name": options.command, "json": options.json}
            outcome = _outcome(options)
        except (SignalCame, KeyboardInterrupt) as e:
            outcome = _interrupted(command["name"], e.name if isinstance(e, SignalCame) else "SIGINT")
        raised = signals.close()
        if raised is not None and isinstance(outcome[1], CdcError):
            outcome = _interrupted(command["name"], raised)
        code = _report_outcome(command["name"], command["json"], outcome)
        if arguments is None and "airflow_cdc_provider.engine.spark.jvm" in sys.modules:
            sys.modules["airflow_cdc_provider.engine.spark.jvm"].end_jvm()  # later, signals would interrupt this, too
        return code


Outcome: TypeAlias = tuple[ExitCode, dict[str, Any] | CdcError]


def _outcome(options: argparse.Namespace) -> Outcome:
    """Run the command; imports its modules, which takes a second."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # it also raises everything that it logs
    logging.getLogger("airflow_cdc_provider.engine.spark.jvm").setLevel(logging.INFO)  # to show the path of its log
    with signals.deferred():  # some modules ignore all exceptions while they are imported
        from airflow_cdc_provider.engine.commands.dispatch import run_command

    try:
        return run_command(options, _ProgressDisplay(options.json))
    except CdcError as e:
        return e.exit_code, e


def _interrupted(command: str, name: str) -> Outcome:
    """Return the outcome of a command that a signal interrupted; one that can be stopped counts as stopped."""
    if command in _STOPPED:
        return ExitCode.DONE, _STOPPED[command]
    return Interrupted.exit_code, Interrupted(
        f"interrupted by {name}", "Start it again; committed data remains, and the rest is repeated."
    )


def _report_outcome(command: str, as_json: bool, outcome: Outcome) -> int:
    """Print the outcome of a command, record it for watchers of a submitted job, and return the exit code."""
    code, result = outcome
    submission = sys.modules.get("airflow_cdc_provider.engine.state.submission")
    error = result if isinstance(result, CdcError) else None
    if hasattr(submission, "end_ours"):  # otherwise, a signal arrived before it was imported
        submission.end_ours(int(code), result if error is None else None, error)  # type: ignore[union-attr]
    if as_json:
        print(json.dumps(result if error is None else {"error": error.as_dict()}))
    elif error is not None:
        print(f"{command}: {error.message}\n{error.solution}", file=sys.stderr)
    elif result is _STOPPED.get(command):
        print(f"{command} was stopped by a signal; committed data remains.")
    else:
        print(_HUMAN.get(command, _plain)(result))  # type: ignore[arg-type]
    if error is not None and error.kind in _LOGGED:
        _show_log()
    return int(code)


def _show_log() -> None:
    """Print the end of Spark's log, if this process has started Spark."""
    jvm = sys.modules.get("airflow_cdc_provider.engine.spark.jvm")
    words = jvm.log_tail() if jvm is not None else ""
    if jvm is not None and words and not values_hidden():
        print(f"The end of Spark's log, {jvm.log_path()}:\n{words}", file=sys.stderr)


class _ProgressDisplay:
    """A display of progress: on a terminal one line that is rewritten, elsewhere a new line for each change."""

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


_UNCOPIED: dict[str, Any] = {"chunks": None, "finished": 0, "rows": 0, "seconds": 0.0}
_STOPPED: dict[str, dict[str, Any]] = {
    "snapshot": _UNCOPIED,
    "stream": {
        "applied_lsn": None,
        "changes": 0,
        "tables": {},
        "lag_bytes": None,
        "lag_seconds": None,
        "caught_up": False,
    },
    "run": {"snapshot": _UNCOPIED, "stream": None},
}
"""The results of commands that were stopped before they had begun."""


def _plain(result: dict[str, Any]) -> str:
    shown = {name: value for name, value in result.items() if not isinstance(value, list | dict)}
    return ", ".join(
        f"{name} {round(value, 1) if isinstance(value, float) else value}" for name, value in shown.items()
    )


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
        lag = f", lag {human_bytes(result['lag_bytes'])}, {result['lag_seconds']:.1f} s" if behind else ""
        lines.append(f"applied  {result['applied_lsn']}{lag}")
        if "offsets" in result:
            lines[-1] += f", {result['lag_messages']:,} messages behind"
            if result["held_messages"]:
                lines.append(f"held     {result['held_messages']:,} of them behind an open transaction of a producer")
        elif not slot and "source" not in result["unreachable"]:
            lines.append("slot     none on the source")
    lines += [f"skipped  {_skipped(each)}" for each in result.get("skipped", ())]
    if len(result["sinks"]) > 1:
        lines += [f"sink     {sink['sink']}: applied {sink['applied_lsn']}" for sink in result["sinks"]]
    lines += [
        f"types    {sink['sink']} converts values to its own types (sink.types: convert)"
        for sink in result["sinks"]
        if sink["converts"]
    ]
    if slot:
        lines.append(
            f"slot     restart_lsn {slot['restart_lsn']}, confirmed_flush_lsn {slot['confirmed_flush_lsn']},"
            f" retains {human_bytes(slot['retained_bytes'])} of {human_bytes(slot['budget']['max_retained_bytes'])}"
            f"{_LEVELS[slot['budget']['level']]}, {slot['wal_status']}"
        )
    for error in _different(result["attention"], result["last_error"]):
        lines.append(f"error    {error['message']}. {error['solution']}")
    chunks = [[t["table"], f"{t['finished']}/{t['chunks']}", f"{t['rows']:,}"] for t in result["tables"]]
    lines.append(text_table(["table", "chunks", "rows"], chunks))
    if result["views"]:
        lines += ["", view_states_text(result["views"])]
    return "\n".join(lines)


def _different(attention: dict[str, Any] | None, last: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the error that needs attention, and the last error if it is a different one."""
    known = attention is not None and last is not None and attention["message"] == last["message"]
    return [error for error in (attention, None if known else last) if error is not None]


def _skipped(skip: dict[str, Any]) -> str:
    """Describe messages that are skipped."""
    last = f"-{skip['last']}" if skip["last"] > skip["first"] else ""
    return f"{skip['topic']}[{skip['partition']}] {skip['first']}{last}: {skip['cause']}"


_LEVELS = {"ok": "", "warning": " (close to the budget)", "exceeded": " (above the budget)"}


def _restart(restart: dict[str, Any]) -> str:
    wait = max(0, math.ceil(restart["next_attempt_at"] - time.time()))
    return f"attempt {restart['attempt']} of {restart['of']} {f'in {wait} s' if wait else 'now'}"


def _named(table: dict[str, Any]) -> str:
    """Return the name of a compared table, with its sink if there are several."""
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
    if result["views"]:
        lines += view_results_text(result["views"])
    if result["not_compared"]:
        lines.append(f"Not compared, because they are changelogs without a key: {', '.join(result['not_compared'])}.")
    lines += [
        f"{sink} converts values to its own types (sink.types: convert): a value that changes counts as a difference."
        for sink in result["converting"]
    ]
    if not result["equal"] and not result["live"] and result["lag_bytes"]:
        lines.append(f"No stream is running, and {human_bytes(result['lag_bytes'])} of log have not been applied.")
    return "\n".join([table, *lines])


def _provision(result: dict[str, Any]) -> str:
    if result["requested"]:
        return "The running stream has been asked to add the new tables."
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
    return f"{copied['rows']:,} rows copied, {_stream(streamed)}"


def _stream(result: dict[str, Any]) -> str:
    caught_up = "caught up" if result["caught_up"] else "stopped"
    return f"{result['changes']:,} changes applied, {caught_up} at {result['applied_lsn']}"


def _resnapshot(result: dict[str, Any]) -> str:
    if result["requested"]:
        return "The running stream has been asked to read the tables again."
    return f"{result['rows']:,} rows read again"


def _maintain(result: dict[str, Any]) -> str:
    lines = [f"{sink['sink']}: {_plain(done)}" for sink in result["sinks"] for done in sink["done"]]
    return "\n".join(lines) or "No sink of the pipeline needs maintenance."


def _init(result: dict[str, Any]) -> str:
    tables = [[t["table"], f"{t['rows']:,}", human_bytes(t["bytes"]), ", ".join(t["key"])] for t in result["tables"]]
    table = text_table(["table", "rows, about", "size", "key"], tables)
    steps = [f"  {step}" for step in result["next"]]
    return "\n".join([table, "", f"Wrote {result['file']}. Look through it, then run:", *steps])


_HUMAN: dict[str, Callable[[dict[str, Any]], str]] = {
    "init": _init,
    "run": _run,
    "stream": _stream,
    "resnapshot": _resnapshot,
    "status": _status,
    "verify": _verify,
    "explain": explanation_text,
    "provision": _provision,
    "maintain": _maintain,
    "preflight": lambda result: f"All {len(result['findings'])} checks passed.",
    "skip": lambda result: "\n".join(f"Skipped: {_skipped(each)}" for each in result["skipped"]),
    "stop": lambda result: f"Asked {', '.join(result['asked'])} to end." if result["asked"] else "Nothing is running.",
}
