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
from dataclasses import dataclass
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
        width = math.ceil(len(ordered) / CELLS)
        groups = [(begin, ordered[begin : begin + width]) for begin in range(0, len(ordered), width)]
        return cls(
            table,
            [chunk["index"] for chunk in ordered],
            bytes(bool(chunk["finished"]) for chunk in ordered),
            sum(chunk["rows"] for chunk in ordered),
            [Cell(_title(group), begin, begin + len(group)) for begin, group in groups],
        )

    def shown(self, finished: Ranges, working: Ranges) -> JsonObject:
        """Return the table with its cells: the fraction of a cell that is ``done``, and whether it is ``running``.

        :param finished: ranges of chunks, of any table, that jobs have finished since the ledger was written.
        :param working: ranges of chunks, of any table, that jobs are copying.
        """
        done, begun = bytearray(self.finished), bytearray(len(self.finished))
        self._mark(done, finished)
        self._mark(begun, working)
        running = (int.from_bytes(begun) & ~int.from_bytes(done)).to_bytes(len(done))
        return {
            "table": self.table,
            "chunks": len(done),
            "finished": done.count(1),
            "rows": self.rows,
            "cells": [
                {
                    "title": cell.title,
                    "done": round(done.count(1, cell.begin, cell.end) / (cell.end - cell.begin), 3),
                    "running": 1 in running[cell.begin : cell.end],
                }
                for cell in self.cells
            ],
        }

    def _mark(self, marks: bytearray, ranges: Ranges) -> None:
        for table, first, last in ranges:
            if table == self.table:
                begin, end = bisect_left(self.indices, first), bisect_right(self.indices, last)
                marks[begin:end] = b"\1" * (end - begin)


@dataclass(frozen=True)
class Ledger:
    """The tables of a pipeline.

    :param epoch: the epoch of the run that wrote the ledger.
    """

    epoch: int
    tables: Sequence[TableChunks]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Ledger:
        """Read a ledger from its JSON object."""
        tables: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for chunk in values["chunks"]:
            tables[str(chunk["table"])].append(chunk)
        return cls(int(values["epoch"]), [TableChunks.of(table, chunks) for table, chunks in tables.items()])

    def shown(self, beats: Iterable[Heartbeat]) -> list[JsonObject]:
        """Return the tables, updated by the reports of jobs on their chunks.

        :param beats: the jobs' heartbeats; those of earlier runs are ignored.
        """
        since = [beat for beat in beats if beat.epoch >= self.epoch]
        finished = [each for beat in since for each in beat.progress.get("finished_chunks", ())]
        working = [each for beat in since if beat.alive for each in beat.progress.get("running_chunks", ())]
        return [table.shown(finished, working) for table in self.tables]


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
