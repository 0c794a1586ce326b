"""The history of jobs: samples of their progress, and their last batches and errors, limited in size.

Each part of a run has its own file in the state, ``history/<part>.json``, so that concurrent parts do not overwrite
each other's entries. The next job of the same part continues the file. :func:`read_history` reads the files of all
parts; it needs only the state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.state.files import State

HistoryEntry: TypeAlias = dict[str, Any]
HistoryEntries: TypeAlias = dict[str, list[HistoryEntry]]

SAMPLE_SECONDS = 10.0
"""Seconds between samples; every part takes a sample when the clock passes a multiple of it."""
SAMPLES, BATCHES, ERRORS = 720, 50, 20
"""The maximum numbers of entries that are kept."""
_FINE_SECONDS = 20 * 60.0
KEPT_SECONDS = _FINE_SECONDS * 2**9
"""Seconds, about a week, after which samples are removed."""
_FOLDER = "history"
_COPIED = ("applied_lsn", "lag_bytes", "lag_seconds")
_OF_SLOT = ("restart_lsn", "confirmed_flush_lsn", "retained_bytes")

_log = logging.getLogger(__name__)


def read_history(state: State) -> HistoryEntries:
    """Return the history of a pipeline's jobs, those that have ended included; ``at`` is in seconds since 1970.

    :returns: ``samples`` (``at, applied_lsn, lag_bytes, lag_seconds, rows_per_second, restart_lsn,
        confirmed_flush_lsn, retained_bytes``; values that a job did not know are ``None``), ``batches`` (``at, part,
        changes, seconds, end_lsn``) and ``errors`` (``at, part, kind, message, solution, count``; the error occurred
        ``count`` times in a row, the last time at ``at``), each oldest first. ``rows_per_second`` is the sum over all
        parts that ran at the time.
    :raises StateUnwritable: if the state cannot be read.
    """
    files = [found for name in state.names(_FOLDER) if (found := state.read_sound(name, _as_file)) is not None]

    def last(kind: str, count: int) -> list[HistoryEntry]:
        return sorted((entry for file in files for entry in file[kind]), key=_at)[-count:]

    return {
        "samples": thin([file["samples"] for file in files]),
        "batches": last("batches", BATCHES),
        "errors": last("errors", ERRORS),
    }


def thin(series: Sequence[Sequence[HistoryEntry]]) -> list[HistoryEntry]:
    """Remove samples that are closer to each other than their age allows.

    One sample is kept for every 10 seconds of the last 20 minutes, for every 20 seconds of the 20 minutes before, for
    every 40 seconds of the 40 minutes before, and so on. The intervals have fixed boundaries, and boundaries of wide
    intervals are also boundaries of narrower ones, so that repeated thinning leaves no gaps.

    :param series: the samples of the parts of a run, each ordered by time. Of samples that different parts took in the
        same interval, the newest is kept, with the sum of their ``rows_per_second``.
    :returns: at most ``SAMPLES`` samples, oldest first.
    """
    now = max((_at(samples[-1]) for samples in series if samples), default=0.0)
    kept: dict[tuple[float, float], dict[int, HistoryEntry]] = {}
    for part, samples in enumerate(series):
        for sample in samples:
            age = now - _at(sample)
            if 0 <= age <= KEPT_SECONDS:  # a clock that was set back leaves samples in the future
                width = _width(age)
                kept.setdefault((width, _at(sample) // width), {})[part] = sample
    return sorted((_together(list(parts.values())) for parts in kept.values()), key=_at)


def _width(age: float) -> float:
    width, reach = SAMPLE_SECONDS, _FINE_SECONDS
    while age > reach:
        width, reach = 2 * width, 2 * reach
    return width


def _together(samples: Sequence[HistoryEntry]) -> HistoryEntry:
    return {**sorted(samples, key=_at)[-1], "rows_per_second": sum(sample["rows_per_second"] for sample in samples)}


def extended(found: Mapping[str, Any] | None, new: Mapping[str, Iterable[HistoryEntry]]) -> HistoryEntries:
    """Return a file of the history with further entries added, within its limits."""
    before = {kind: list(found[kind]) if found else [] for kind in ("samples", "batches", "errors")}
    errors = before["errors"]
    for error in new["errors"]:
        if errors and all(errors[-1][name] == error[name] for name in ("kind", "message")):
            errors.append({**error, "count": errors.pop()["count"] + 1})
        else:
            errors.append({**error, "count": 1})
    return {
        "samples": thin([[*before["samples"], *new["samples"]]]),
        "batches": [*before["batches"], *new["batches"]][-BATCHES:],
        "errors": errors[-ERRORS:],
    }


class History:
    """The history of one part of a run: collected immediately, and written from time to time by the heartbeat's thread.

    :param epoch: the epoch of the run; ``None`` for a failure before it had one.
    """

    def __init__(self, state: State, part: str, epoch: int | None = None) -> None:
        self.state = state
        self._part = part
        self._epoch = epoch
        self._lock = threading.Lock()
        self._new = _empty()
        self._sampled = time.time()
        self._counted = 0
        self._trouble = ""

    @property
    def due(self) -> bool:
        """Return whether it is time for a sample."""
        return time.time() // SAMPLE_SECONDS != self._sampled // SAMPLE_SECONDS

    def sample(self, progress: Mapping[str, Any]) -> None:
        """Take a sample of the part's progress, with the rows or changes per second since the last one."""
        now, count = time.time(), progress.get("changes", progress.get("rows", 0))
        passed, more = now - self._sampled, count - self._counted
        self._sampled, self._counted = now, count
        slot = progress.get("slot") or {}
        self._note(
            "samples",
            {name: progress.get(name) for name in _COPIED}
            | {"rows_per_second": round(max(0, more) / passed) if passed > 0 else 0}
            | {name: slot.get(name) for name in _OF_SLOT},
        )

    def batch(self, changes: int, seconds: float, end: LogPosition) -> None:
        """Add a unit that was committed.

        :param end: the LSN at which it ends.
        """
        self._note(
            "batches",
            {"part": self._part, "changes": changes, "seconds": round(seconds, 3), "end_lsn": format_lsn(end)},
        )

    def error(self, error: CdcError) -> None:
        """Add an error, even if the part continues after it."""
        self._note("errors", {"part": self._part, **error.as_dict()})

    def _note(self, kind: str, entry: HistoryEntry) -> None:
        with self._lock:
            self._new[kind].append({"at": round(time.time(), 3), **entry})

    def write(self) -> None:
        """Write the new entries into the file, unless it belongs to a later run.

        A failure does not end the job: entries that cannot be written now are written next time.
        """
        with self._lock:
            new, self._new = self._new, _empty()
        try:
            self._write(new)
        except Exception as e:  # any error of a file system of fsspec
            with self._lock:
                self._new = {kind: deque([*new[kind], *since], since.maxlen) for kind, since in self._new.items()}
            if str(e) != self._trouble:
                _log.warning("%s: the history could not be written: %s", self._part, e)
            self._trouble = str(e)
        else:
            self._trouble = ""

    def _write(self, new: Mapping[str, deque[HistoryEntry]]) -> None:
        if not any(new.values()):
            return
        name = f"{_FOLDER}/{self._part}.json"
        found = self.state.read_sound(name, _as_file)
        latest = found["epoch"] if found else 0
        if self._epoch is None or self._epoch >= latest:
            self.state.write(name, {"epoch": self._epoch or latest, **extended(found, new)})


def _as_file(values: dict[str, Any]) -> dict[str, Any]:
    """Check that a file of the history has the values that readers need."""
    as_type(values["epoch"], int, "epoch")
    for kind, needed in _NEEDED.items():
        for entry in as_type(values[kind], list[dict[str, Any]], kind):
            for name, hint in needed.items():
                as_type(entry[name], hint, f"{kind}.{name}")
    return values


_NEEDED: dict[str, dict[str, Any]] = {
    "samples": {"at": float, "rows_per_second": float},
    "batches": {"at": float},
    "errors": {"at": float, "kind": str, "message": str, "solution": str, "count": int},
}


def _empty() -> dict[str, deque[HistoryEntry]]:
    return {"samples": deque(maxlen=SAMPLES), "batches": deque(maxlen=BATCHES), "errors": deque(maxlen=ERRORS)}


def _at(entry: HistoryEntry) -> float:
    return float(entry["at"])
