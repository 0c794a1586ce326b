"""The contents of a log of entries, and their changes by entries. Pure functions.

The *contents* of a log are JSON values by section and key. A :class:`Change` removes some and sets others, always as
whole values. So the contents are the result of the changes of all entries in order, whatever the sections are, and any
entry can include the contents after it.

==========  ===============================================================================================
``head``    ``epoch``, ``owner``, ``applied``, ``advanced``; nothing before the pipeline is provisioned
``source``  the record's ``identity``
``tables``  by label: ``definition``, ``schema``, ``name``
``chunks``  by label and index: ``definition``, ``keys``, ``snapshot``, ``high``, ``rows``, ``epoch``
``step``    work that has been decided but may not have been done yet, see :class:`Step`
==========  ===============================================================================================

A sink may have additional sections.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.lsn import LOG_START, LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import ChunkRecord, Record, Target, Watermark
from airflow_cdc_provider.engine.core.table import Table

Contents = Mapping[str, Mapping[str, Any]]
"""JSON values by section and key."""

_VALUE_BYTES = 256 << 10  # approximate; a store may write each value as a message of limited size


@dataclass(frozen=True)
class Change:
    """A change of a log's contents: keys are removed, then others are set.

    :param removed: keys by section.
    :param emptied: sections that are emptied.
    """

    set: Contents = field(default_factory=dict)
    removed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    emptied: Sequence[str] = ()

    def apply(self, contents: Contents) -> Contents:
        """Return the contents after the change."""
        after = {name: section for name, section in contents.items() if name not in self.emptied}
        for name, keys in self.removed.items():
            gone = set(keys)
            after[name] = {key: value for key, value in after.get(name, {}).items() if key not in gone}
        for name, values in self.set.items():
            after[name] = {**after.get(name, {}), **values}
        return {name: section for name, section in after.items() if section}

    def __add__(self, other: Change) -> Change:
        """Return both changes in sequence; the second must not remove a value that the first sets.

        :raises ValueError: when it does.
        """
        clash = [name for name in other.emptied if name in self.set]
        clash += [name for name, keys in other.removed.items() if set(keys) & set(self.set.get(name, ()))]
        if clash:
            raise ValueError(f"a change of {', '.join(clash)} would be undone")
        names = [*self.set, *(name for name in other.set if name not in self.set)]
        removed = [*self.removed, *(name for name in other.removed if name not in self.removed)]
        return Change(
            {name: {**self.set.get(name, {}), **other.set.get(name, {})} for name in names},
            {name: [*self.removed.get(name, ()), *other.removed.get(name, ())] for name in removed},
            [*self.emptied, *other.emptied],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the change as JSON values; :meth:`from_dict` reads them back."""
        parts = {"set": self.set, "removed": self.removed, "emptied": self.emptied}
        return {name: part for name, part in parts.items() if part}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Change:
        """Return the change from the values of :meth:`to_dict`."""
        return cls(**values)


@dataclass(frozen=True)
class Step:
    """Decided work outside of the log, which any process may do, repeatedly if necessary.

    :param number: number of the entry that decided it. Numbers only grow, even from one log of a pipeline to the next.
        An object that records a step's number together with its change, such as a table, contains this step and all
        before.
    :param work: the work; JSON values.
    :param then: the change of the entry that reports the completion.
    """

    number: int
    work: Mapping[str, Any]
    then: Change


def step_of(contents: Contents) -> Step | None:
    """Return the step that has been decided but not reported as done."""
    found = contents.get("step")
    return None if not found else Step(found["number"], found["work"], Change.from_dict(found["then"]))


def decided(number: int, work: Mapping[str, Any], then: Change) -> Change:
    """Return the change that decides a step."""
    return Change({"step": {"number": number, "work": work, "then": then.to_dict()}})


def carried_out(step: Step) -> Change:
    """Return the change that reports a step as done."""
    return step.then + Change(emptied=["step"])


def targets_of(contents: Contents) -> dict[str, Target]:
    """Return the recorded targets by label."""
    return {label: target_of(contents, label) for label in sorted(contents.get("tables", {}))}


def target_of(contents: Contents, label: str) -> Target:
    """Return the recorded target of a table."""
    found = contents["tables"][label]
    return Target(Table.from_dict(found["definition"]), found["schema"], found["name"])


def highest(contents: Contents, label: str | None = None) -> LogPosition:
    """Return the highest high watermark of committed reads, of one table or all; 0 if there are none."""
    chunks = contents.get("chunks", {}).values()
    return max((parse_lsn(c["high"]) for c in chunks if "high" in c and label in (None, _label(c))), default=LOG_START)


def record_of(contents: Contents) -> Record | None:
    """Return the commit record; ``None`` if there is none."""
    head = contents.get("head")
    if not head:
        return None
    chunks = [_chunk_record(value) for value in contents.get("chunks", {}).values()]
    return Record(
        epoch=head["epoch"],
        applied=parse_lsn(head["applied"]),
        advanced=head["advanced"],
        identity=contents.get("source", {}),
        targets=tuple(targets_of(contents).values()),
        chunks=tuple(sorted(chunks, key=lambda c: (c.chunk.table, c.chunk.index))),
    )


def provisioned(
    targets: Sequence[Target], chunks: Sequence[Chunk], identity: Mapping[str, Any], start: LogPosition, now: float
) -> Change:
    """Return the change that begins a pipeline."""
    head = {"epoch": 0, "owner": "", "applied": format_lsn(start), "advanced": now}
    return Change({"head": head, "source": identity}) + added(targets, chunks)


def restarted(targets: Sequence[Target], identity: Mapping[str, Any], start: LogPosition, now: float) -> Change:
    """Return the change that begins a pipeline again at another start of the slot."""
    whole = [Chunk(target.table.label, 0, None, None) for target in targets]
    head = {"applied": format_lsn(start), "advanced": now}
    # A change first removes and then sets, so sections lose only values that are not set again.
    return Change({"head": head, "source": identity}, emptied=["source", "tables", "chunks"]) + added(targets, whole)


def taken(contents: Contents, owner: str, now: float, at_least: int = 0) -> Change:
    """Return the change of the epoch, taken from the clock, so that no epoch repeats even in a recreated record."""
    epoch = max(contents["head"]["epoch"] + 1, int(now * 1000), at_least)
    return Change({"head": {"epoch": epoch, "owner": owner}})


def added(targets: Iterable[Target], chunks: Iterable[Chunk]) -> Change:
    """Return the change that adds tables to the pipeline, with unfinished chunks."""
    plans = {chunk_key(chunk): {"definition": chunk.to_dict()} for chunk in chunks}
    return Change({"tables": {target.table.label: _table(target) for target in targets}, "chunks": plans})


def forgotten(contents: Contents, labels: Iterable[str]) -> Change:
    """Return the change that removes tables from the pipeline."""
    gone = set(labels)
    return Change(removed={"tables": sorted(gone), "chunks": _chunks(contents, gone)})


def redefined(target: Target) -> Change:
    """Return the change that gives a target another definition."""
    return Change({"tables": {target.table.label: _table(target)}})


def noted(values: Mapping[str, Any]) -> Change:
    """Return the change that notes the source's new state."""
    return Change({"source": values})


def chunk_committed(chunk: Chunk, watermark: Watermark, rows: int, epoch: int) -> Change:
    """Return the change that records a chunk as committed."""
    return Change({"chunks": {chunk_key(chunk): _finished(chunk, None, watermark, rows, epoch)}})


def reread(
    contents: Contents, target: Target, keys: frozenset[tuple[str, ...]] | None, watermark: Watermark, rows: int
) -> Change:
    """Return the change that records a re-read of some keys or a whole table, with the definition ``target``."""
    label, epoch = target.table.label, contents["head"]["epoch"]
    if keys is None:
        chunk, gone = Chunk(label, 0, None, None), _chunks(contents, {label})
        read = {chunk_key(chunk): _finished(chunk, None, watermark, rows, epoch)}
    else:
        indexes = [v["definition"]["index"] for v in contents.get("chunks", {}).values() if _label(v) == label]
        read, gone = {}, []
        for n, part in enumerate(_parts(sorted(keys)), max(indexes, default=0) + 1):
            chunk = Chunk(label, n, None, None)
            read[chunk_key(chunk)] = _finished(chunk, part, watermark, 0 if read else rows, epoch)
    return Change({"chunks": read}, {"chunks": gone}) + redefined(target)


def unit_applied(contents: Contents, end: LogPosition, now: float, values: Mapping[str, Any] | None = None) -> Change:
    """Return the change that advances the applied LSN to ``end``.

    Re-reads of single keys are recorded only as filters; those that the stream has passed are removed.

    :param values: values of the source to note in the same step.
    """
    passed = [
        key
        for key, value in contents.get("chunks", {}).items()
        if value.get("keys") is not None and parse_lsn(value["high"]) <= end
    ]
    moved = Change({"head": {"applied": format_lsn(end), "advanced": now}}, {"chunks": passed})
    return moved + noted(values) if values else moved


def chunk_key(chunk: Chunk) -> str:
    return f"{chunk.table}#{chunk.index}"


def _label(value: Mapping[str, Any]) -> str:
    return str(value["definition"]["table"])


def _chunks(contents: Contents, labels: set[str]) -> list[str]:
    return [key for key, value in contents.get("chunks", {}).items() if _label(value) in labels]


def _table(target: Target) -> dict[str, Any]:
    return {"definition": target.table.to_dict(), "schema": target.schema, "name": target.name}


def _finished(
    chunk: Chunk, keys: Sequence[tuple[str, ...]] | None, watermark: Watermark, rows: int, epoch: int
) -> dict[str, Any]:
    return {
        "definition": chunk.to_dict(),
        "keys": keys,
        "snapshot": str(watermark.snapshot),
        "high": format_lsn(watermark.high),
        "rows": rows,
        "epoch": epoch,
    }


def _parts(keys: Sequence[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Yield keys in parts of bounded size; at least one part."""
    part: list[tuple[str, ...]] = []
    size = 0
    for key in keys:
        if part and size >= _VALUE_BYTES:
            yield part
            part, size = [], 0
        part.append(key)
        size += len(json.dumps(key))
    yield part


def _chunk_record(value: Mapping[str, Any]) -> ChunkRecord:
    chunk, keys = Chunk.from_dict(value["definition"]), value.get("keys")
    return ChunkRecord(
        chunk,
        Watermark(Snapshot.parse(value["snapshot"]), parse_lsn(value["high"])) if "snapshot" in value else None,
        value.get("rows", 0),
        None if keys is None else frozenset(tuple(key) for key in keys),
    )
