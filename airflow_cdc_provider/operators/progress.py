"""The progress of a running pipeline as readable lines in a task's log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

PROGRESS_SECONDS = 10.0

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def progress_line(status: Mapping[str, Any]) -> str:
    """One line of what ``commands.status`` returned; what is not known yet is left out."""
    parts = []
    tables = status.get("tables") or []
    chunks = sum(table.get("chunks") or 0 for table in tables)
    if chunks:
        finished = sum(table.get("finished") or 0 for table in tables)
        parts.append(f"{finished} of {chunks} chunks finished")
    lag = [format_bytes(status["lag_bytes"])] if status.get("lag_bytes") is not None else []
    lag += [f"{status['lag_seconds']:.1f} s"] if status.get("lag_seconds") is not None else []
    if lag:
        parts.append(f"lag {' / '.join(lag)}")
    if status.get("applied_lsn"):
        parts.append(f"applied up to {status['applied_lsn']}")
    slot = status.get("slot") or {}
    if slot.get("retained_bytes") is not None:
        parts.append(f"slot retains {format_bytes(slot['retained_bytes'])} of WAL ({slot.get('wal_status')})")
    return f"{status['pipeline']}: {', '.join(parts) or status.get('state') or 'nothing to report yet'}"


def format_bytes(size: float) -> str:
    """A size such as ``64.0 MiB``."""
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


class ProgressLog:
    """Logs a line of progress at intervals during a block.

    :param status: returns the pipeline's status; may fail while the job starts.
    :param log: takes each line.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]], log: Callable[[str], object]) -> None:
        self._status = status
        self._log = log
        self._ended = threading.Event()
        # A daemon, since a server that does not answer must not keep the task alive.
        self._thread = threading.Thread(target=self._run, name="cdc-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()

    def _run(self) -> None:
        last = ""
        while not self._ended.wait(PROGRESS_SECONDS):
            try:
                line = progress_line(self._status())
            except Exception as e:
                line = f"The progress cannot be read at the moment: {e}"
            if line != last and not self._ended.is_set():
                self._log(line)
            last = line
