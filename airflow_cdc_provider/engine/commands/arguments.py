"""The arguments of the command line, and its help: commands by purpose, each with an example."""

from __future__ import annotations

import argparse
import re

from airflow_cdc_provider import __version__
from airflow_cdc_provider.engine.core.chunk_ranges import Range, parse_chunks
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section_values import as_seconds

GROUPS = {
    "Set up": {
        "init": "Write a pipeline file for tables of a source, without changing anything there.",
        "preflight": "Check everything without changing anything.",
        "provision": "Create or verify publication, slot, plan and commit record.",
    },
    "Copy": {
        "run": "Provision, snapshot, stream until caught up.",
        "snapshot": "Copy chunks until all are finished.",
        "stream": "Follow the log.",
        "stop": "Ask the running job to end after its current unit.",
    },
    "Watch": {
        "status": "Show the state of the pipeline.",
        "verify": "Compare source and sink.",
        "explain": "Show what keeps a view equal to its SELECT, and what that costs.",
    },
    "Maintain": {
        "resnapshot": "Read tables again.",
        "skip": "Skip messages of a topic that stop the pipeline.",
        "maintain": "Merge small files of sinks, and remove replaced files.",
        "drop": "Remove slot, publication, state and commit record, but no target tables or views.",
    },
}
"""The descriptions of the commands, by purpose and name."""

EXAMPLES = {
    "init": "init --pipeline shop.yaml --source-conn-id shop_pg --sink-conn-id dw_pg",
    "preflight": "preflight --pipeline shop.yaml",
    "provision": "provision --pipeline shop.yaml",
    "run": "run --pipeline shop.yaml",
    "snapshot": "snapshot --pipeline shop.yaml",
    "stream": "stream --pipeline shop.yaml --until caught-up",
    "stop": "stop --pipeline shop.yaml",
    "status": "status --pipeline shop.yaml --json",
    "verify": "verify --pipeline shop.yaml",
    "explain": "explain dwd.orders --pipeline shop.yaml",
    "resnapshot": "resnapshot --pipeline shop.yaml --table public.orders --where 'id > 1000'",
    "skip": "skip --pipeline clicks.yaml --topic clicks --partition 0 --offset 17",
    "maintain": "maintain --pipeline lake.yaml --retention 8h",
    "drop": "drop --pipeline shop.yaml",
}
"""An example of each command, without the program's name."""

_FIRST_STEPS = ("init", "preflight", "run", "status")
_READERS = {"init", "preflight", "stop", "status", "verify", "explain", "maintain"}
"""The commands that take no epoch, so that no other run can be in their way."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    root = argparse.ArgumentParser(
        prog="airflow-cdc",
        usage="airflow-cdc COMMAND --pipeline FILE [options]",
        description="Change data capture from Postgres on Spark.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    # The overview lists the commands; argparse cannot group them.
    subparsers = root.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog=root.prog
    )
    commands = {name: _command(subparsers, name, text) for group in GROUPS.values() for name, text in group.items()}
    _add_init(commands["init"])
    commands["preflight"].add_argument("--no-spark", action="store_true", help="do not start Spark to check executors")
    _add_parts(commands["snapshot"], commands["stream"])
    commands["explain"].add_argument("view", metavar="VIEW", help="the view's name, such as dwd.orders")
    commands["maintain"].add_argument(
        "--retention", type=_duration, metavar="DURATION", help="how long replaced files are kept, such as '8h'"
    )
    _add_skip(commands["skip"])
    _add_drop(commands["drop"])
    _add_resnapshot(commands["resnapshot"])
    return root


def _overview() -> str:
    """Return the commands by purpose, and the first steps as examples."""
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:11} {text}" for name, text in group.items()), ""]
    lines += ["Examples:", *(f"  airflow-cdc {EXAMPLES[name]}" for name in _FIRST_STEPS), ""]
    return "\n".join([*lines, "`airflow-cdc COMMAND --help` shows the options of a command."])


def _command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    """Add a command with the options that all commands of its kind have."""
    command = subparsers.add_parser(
        name,
        description=text,
        epilog=f"Example:\n  airflow-cdc {EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--pipeline", required=True, metavar="FILE", help="the pipeline file")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    if name not in _READERS:
        command.add_argument("--takeover", action="store_true", help="continue even if another run is alive")
    return command


def _add_init(command: argparse.ArgumentParser) -> None:
    for side in ("source", "sink"):
        command.add_argument(
            f"--{side}-conn-id",
            required=True,
            type=_conn_id,
            metavar="ID",
            help=f"the Airflow connection of the {side}'s Postgres, here the variable AIRFLOW_CONN_<ID>",
        )
    command.add_argument(
        "--table", action="append", metavar="SCHEMA.TABLE", help="only these tables; may be a glob, may be repeated"
    )
    command.add_argument("--mode", default="mirror", choices=["mirror", "changelog"], help="default: mirror")
    command.add_argument("--state", metavar="URL", help="default: file:///var/lib/airflow-cdc/<pipeline>")


def _add_parts(snapshot: argparse.ArgumentParser, stream: argparse.ArgumentParser) -> None:
    snapshot.add_argument(
        "--chunks", type=_chunks, metavar="JSON", help='copy only these: [["public.orders", first index, last], ...]'
    )
    stream.add_argument(
        "--until",
        default="forever",
        metavar="forever|caught-up|X/Y",
        help="continue until stopped (default), until everything committed so far is applied, or until an LSN",
    )
    for part in (snapshot, stream):
        part.add_argument("--epoch", type=int, help="the epoch of the run that this part belongs to")


def _add_skip(command: argparse.ArgumentParser) -> None:
    command.add_argument("--topic", required=True, metavar="NAME", help="the topic")
    command.add_argument("--partition", required=True, type=int, metavar="N", help="its partition")
    command.add_argument(
        "--offset",
        required=True,
        action="append",
        type=_offsets,
        metavar="N|FIRST-LAST",
        help="one message or a range of messages; may be repeated",
    )


def _add_drop(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--views", action="store_true", help="instead drop the tables of views that the file no longer has"
    )
    command.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    command.add_argument("--source-gone", action="store_true", help="continue even if the source cannot be reached")


def _add_resnapshot(command: argparse.ArgumentParser) -> None:
    command.add_argument("--table", action="append", metavar="SCHEMA.TABLE", help="read this table; may be repeated")
    command.add_argument("--all", action="store_true", help="read all tables, with a new slot and publication")
    command.add_argument("--where", metavar="SQL", help="read only rows that match on either side")


def _conn_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w{0,99}", text, re.ASCII):  # an address, perhaps with a password: it is not quoted
        raise argparse.ArgumentTypeError(
            "Give the id of a connection, of letters, digits and _, and its address in AIRFLOW_CONN_<ID>."
        )
    return text


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


def _offsets(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isascii() and first.isdigit() and (last or first).isascii() and (last or first).isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid. Give an offset, or the first and the last: 5-9.")
    return int(first), int(last or first)
