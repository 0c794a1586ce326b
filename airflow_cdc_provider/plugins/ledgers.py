"""The chunks of a pipeline's tables as the cells of a grid; if a table has many chunks, a cell has several of them.

A ledger may have a hundred thousand chunks. Therefore it is read and divided once for all users, until its file is
replaced. Later reports of jobs are applied to it as ranges.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat

CELLS = 240
"""Maximum number of cells of a table's grid; if a table has more chunks, a cell has several of them."""
_FILE = "ledger.json"
_REMEMBERED = 32
"""Number of most recently used ledgers that are kept."""

JsonObject = dict[str, Any]
Ranges = Iterable[Sequence[Any]]


@dataclass(frozen=True)
class Cell:
    """Consecutive chunks of a table by their positions: ``begin`` is included, ``end`` is not."""

    title: str
    begin: int
    end: int


@dataclass(frozen=True)
class TableChunks:
    """The chunks of a table, in the order of their indices.

    :param finished: a byte for each chunk, 1 if the ledger has it as finished.
    """

    table: str
    indices: Sequence[int]
    finished: bytes
    rows: int
    cells: Sequence[Cell]

    @classmethod
    def of(cls, table: str, chunks: Iterable[Mapping[str, Any]]) -> TableChunks:
        """Divide the chunks of a table in a ledger into cells."""
        ordered = sorted(chunks, key=lambda chunk: int(chunk["index"]))
        width = max(1, math.ceil(len(ordered) / CELLS))
        groups = [(begin, ordered[begin : begin + width]) for begin in range(0, len(ordered), width)]
        return cls(
            table,
            [chunk["index"] for chunk in ordered],
            bytes(bool(chunk["finished"]) for chunk in ordered),
            sum(chunk["rows"] for chunk in ordered),
            [Cell(_title(group), begin, begin + len(group)) for begin, group in groups],
        )

    def progress(self, finished: Ranges, working: Ranges) -> tuple[int, bool]:
        """Return the number of finished chunks, and whether some are being copied.

        :param finished: ranges of its chunks that jobs have finished since the ledger was written.
        :param working: ranges of its chunks that jobs are copying.
        """
        done, running = self._marks(finished, working)
        return done.count(1), 1 in running

    def shown(self, finished: Ranges, working: Ranges) -> list[JsonObject]:
        """Return the cells: the fraction of each that is ``done``, and whether it is ``running``.

        :param finished, working: as in :meth:`progress`.
        """
        done, running = self._marks(finished, working)
        return [
            {
                "title": cell.title,
                "done": round(done.count(1, cell.begin, cell.end) / (cell.end - cell.begin), 3),
                "running": 1 in running[cell.begin : cell.end],
            }
            for cell in self.cells
        ]

    def _marks(self, finished: Ranges, working: Ranges) -> tuple[bytearray, bytes]:
        """Return a byte for each chunk that is finished, and one for each that is being copied."""
        done, begun = bytearray(self.finished), bytearray(len(self.finished))
        self._mark(done, finished)
        self._mark(begun, working)
        return done, (int.from_bytes(begun) & ~int.from_bytes(done)).to_bytes(len(done))

    def _mark(self, marks: bytearray, ranges: Ranges) -> None:
        for _, first, last in ranges:
            begin, end = bisect_left(self.indices, first), bisect_right(self.indices, last)
            marks[begin:end] = b"\1" * (end - begin)


@dataclass(frozen=True)
class Ledger:
    """The tables of a pipeline.

    :param epoch: the epoch of the run that wrote the ledger.
    :param shapes: columns and key of each table; empty in ledgers of older versions.
    :param targets: for each sink its kind, and schema and name of the target of each table.
    """

    epoch: int
    tables: Sequence[TableChunks]
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    targets: Sequence[tuple[str, Mapping[str, Sequence[str]]]] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Ledger:
        """Read a ledger from its JSON object."""
        targets = [(str(sink.get("type", "")), dict(sink["targets"])) for sink in values.get("sinks", ())]
        tables: dict[str, list[Mapping[str, Any]]] = {}
        for chunk in values["chunks"]:
            tables.setdefault(str(chunk["table"]), []).append(chunk)
        for label in values.get("tables", {}):
            tables.setdefault(label, [])  # without a snapshot, a table has no chunks
        return cls(
            int(values["epoch"]),
            [TableChunks.of(table, chunks) for table, chunks in tables.items()],
            dict(values.get("tables", {})),
            targets,
        )

    def progress(self, beats: Iterable[Heartbeat]) -> list[tuple[TableChunks, tuple[int, bool]]]:
        """Return each table with the progress of its copy, see :meth:`TableChunks.progress`.

        :param beats: the jobs' heartbeats; those of earlier runs are ignored.
        """
        finished, working = self._ranges(beats)
        nothing: Ranges = ()
        return [
            (table, table.progress(finished.get(table.table, nothing), working.get(table.table, nothing)))
            for table in self.tables
        ]

    def cells(self, label: str, beats: Iterable[Heartbeat]) -> JsonObject:
        """Return the cells of a table, updated by the reports of jobs on their chunks."""
        finished, working = self._ranges(beats)
        table = next(table for table in self.tables if table.table == label)
        return {"cells": table.shown(finished.get(label, ()), working.get(label, ()))}

    def _ranges(self, beats: Iterable[Heartbeat]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the ranges of chunks that jobs have finished, and those that they are copying, by table."""
        finished: dict[str, list[Any]] = defaultdict(list)
        working: dict[str, list[Any]] = defaultdict(list)
        for beat in beats:
            if beat.epoch >= self.epoch:
                for each in beat.progress.get("finished_chunks", ()):
                    finished[each[0]].append(each)
                for each in beat.progress.get("running_chunks", ()) if beat.alive else ():
                    working[each[0]].append(each)
        return finished, working


class Ledgers:
    """A cache of ledgers; each is read again only after its file has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, Ledger | None]] = {}

    def of(self, state: State) -> Ledger | None:
        """Return the ledger of a pipeline, or ``None`` if it has none.

        :raises StateUnwritable: if the state cannot be read.
        """
        version = state.version(_FILE)
        if version is None:
            return None
        with self._lock:
            known = self._known.pop(state.url, None)
            if known is None or known[0] != version:
                known = version, state.read_sound(_FILE, Ledger.of)
            self._known[state.url] = known
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
            return known[1]


def _title(group: Sequence[Mapping[str, Any]]) -> str:
    first, last = Chunk.from_dict(group[0]), Chunk.from_dict(group[-1])
    return first.title if len(group) == 1 else f"{first.table}[{first.index} .. {last.index}]"
