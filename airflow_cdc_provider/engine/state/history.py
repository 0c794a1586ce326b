"""What jobs have reported over time: samples of their progress, their last batches and errors, bounded.

Each part of a run keeps a file of its own in the state, ``history/<part>.json``, so that parts that run beside each
other do not overwrite one another's; the next job of the same part continues it. :func:`read_history` is for readers:
it needs the state alone, and puts the parts together.
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

Entry: TypeAlias = dict[str, Any]
Entries: TypeAlias = dict[str, list[Entry]]

SAMPLE_SECONDS = 10.0
"""Every part takes a sample when time by the clock passes a multiple of it."""
SAMPLES, BATCHES, ERRORS = 720, 50, 20
"""How many of each are kept."""
_FINE_SECONDS = 20 * 60.0
KEPT_SECONDS = _FINE_SECONDS * 2**9
"""Samples older than that, a week, are forgotten."""
_FOLDER = "history"
_COPIED = ("applied_lsn", "lag_bytes", "lag_seconds")
_OF_SLOT = ("restart_lsn", "confirmed_flush_lsn", "retained_bytes")

_log = logging.getLogger(__name__)


def read_history(state: State) -> Entries:
    """What the jobs of a pipeline have reported, those that have ended included; ``at`` in seconds since 1970.

    :returns: ``samples`` (``at, applied_lsn, lag_bytes, lag_seconds, rows_per_second, restart_lsn,
        confirmed_flush_lsn, retained_bytes``; what a job did not know is ``None``), ``batches`` (``at, part, changes,
        seconds, end_lsn``) and ``errors`` (``at, part, kind, message, solution, count``; ``count`` times in a row, the
        last time at ``at``), each oldest first. ``rows_per_second`` is that of all parts that ran at the time.
    :raises StateUnwritable: when the state cannot be read.
    """
    files = [found for name in state.names(_FOLDER) if (found := state.read_sound(name, _as_file)) is not None]

    def last(kind: str, count: int) -> list[Entry]:
        return sorted((entry for file in files for entry in file[kind]), key=_at)[-count:]

    return {
        "samples": thin([file["samples"] for file in files]),
        "batches": last("batches", BATCHES),
        "errors": last("errors", ERRORS),
    }


def thin(series: Sequence[Sequence[Entry]]) -> list[Entry]:
    """Leave the older samples out that are closer to each other than their age asks for.

    One is kept for every 10 seconds of the last 20 minutes, for every 20 seconds of the 20 minutes before, for every
    40 of the 40 before, and so on. Time is cut where it always was, and the cuts of one width are cuts of the smaller
    ones too, so that thinning again and again leaves no holes.

    :param series: of parts of a run, each in the order of time. Of those that ran at the same time, the newest sample
        is kept, with the ``rows_per_second`` of all.
    :returns: at most ``SAMPLES``, oldest first.
    """
    now = max((_at(samples[-1]) for samples in series if samples), default=0.0)
    kept: dict[tuple[float, float], dict[int, Entry]] = {}
    for part, samples in enumerate(series):
        for sample in samples:
            age = now - _at(sample)
            if 0 <= age <= KEPT_SECONDS:  # a clock that has been set back leaves samples of a time to come
                width = _width(age)
                kept.setdefault((width, _at(sample) // width), {})[part] = sample
    return sorted((_together(list(parts.values())) for parts in kept.values()), key=_at)


def _width(age: float) -> float:
    width, reach = SAMPLE_SECONDS, _FINE_SECONDS
    while age > reach:
        width, reach = 2 * width, 2 * reach
    return width


def _together(samples: Sequence[Entry]) -> Entry:
    return {**sorted(samples, key=_at)[-1], "rows_per_second": sum(sample["rows_per_second"] for sample in samples)}


def extended(found: Mapping[str, Any] | None, new: Mapping[str, Iterable[Entry]]) -> Entries:
    """A file of the history with further entries, within its bounds."""
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
    """What one part of a run reports: noted at once, written now and then, by the thread that beats the run's heart.

    :param epoch: of the run; ``None`` for what has failed before it had one.
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
        """Whether it is time for a sample."""
        return time.time() // SAMPLE_SECONDS != self._sampled // SAMPLE_SECONDS

    def sample(self, progress: Mapping[str, Any]) -> None:
        """Take a sample of what the part reports, with the rows or changes a second since the last one."""
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
        """Note a unit that was committed, ``end`` being the LSN at which it ends."""
        self._note(
            "batches",
            {"part": self._part, "changes": changes, "seconds": round(seconds, 3), "end_lsn": format_lsn(end)},
        )

    def error(self, error: CdcError) -> None:
        """Note an error, also one that the part goes on after."""
        self._note("errors", {"part": self._part, **error.as_dict()})

    def _note(self, kind: str, entry: Entry) -> None:
        with self._lock:
            self._new[kind].append({"at": round(time.time(), 3), **entry})

    def write(self) -> None:
        """Bring what has been noted into the file, unless it is that of a later run: this one has been overtaken.

        A job does not fail for it: what cannot be written now, is next time.
        """
        with self._lock:
            new, self._new = self._new, _empty()
        try:
            self._write(new)
        except Exception as e:  # whatever a file system of fsspec raises
            with self._lock:
                self._new = {kind: deque([*new[kind], *since], since.maxlen) for kind, since in self._new.items()}
            if str(e) != self._trouble:
                _log.warning("%s: the history could not be written: %s", self._part, e)
            self._trouble = str(e)
        else:
            self._trouble = ""

    def _write(self, new: Mapping[str, deque[Entry]]) -> None:
        if not any(new.values()):
            return
        name = f"{_FOLDER}/{self._part}.json"
        found = self.state.read_sound(name, _as_file)
        latest = found["epoch"] if found else 0
        if self._epoch is None or self._epoch >= latest:
            self.state.write(name, {"epoch": self._epoch or latest, **extended(found, new)})


def _as_file(values: dict[str, Any]) -> dict[str, Any]:
    """Check that a file of the history has what is read of it."""
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


def _empty() -> dict[str, deque[Entry]]:
    return {"samples": deque(maxlen=SAMPLES), "batches": deque(maxlen=BATCHES), "errors": deque(maxlen=ERRORS)}


def _at(entry: Entry) -> float:
    return float(entry["at"])
