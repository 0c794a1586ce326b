"""What an entry of the log changes, and what the entries before it amount to. Pure functions.

The *contents* of a log are JSON values by section and key. A :class:`Change` removes some and sets others, whole; so
whatever the sections are, the contents are the changes of all entries in their order, and any entry can carry the
contents as they are after it.

==========  ===============================================================================================
``head``    ``epoch``, ``owner``, ``applied``, ``advanced``; nothing before the pipeline is provisioned
``source``  the record's ``identity``
``tables``  by label: ``definition``, ``schema``, ``name``
``chunks``  by label and index: ``definition``, ``keys``, ``snapshot``, ``high``, ``rows``, ``epoch``
``step``    what has been decided and may not have been carried out beside the log yet, see :class:`Step`
==========  ===============================================================================================

A sink may have further sections of its own.
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

_VALUE_BYTES = 256 << 10  # about; a store may write each value as a message of limited size


@dataclass(frozen=True)
class Change:
    """What becomes of the contents of a log: keys are removed, then others set.

    :param removed: keys by section.
    :param emptied: sections of which nothing stays.
    """

    set: Contents = field(default_factory=dict)
    removed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    emptied: Sequence[str] = ()

    def apply(self, contents: Contents) -> Contents:
        """The contents after the change."""
        after = {name: section for name, section in contents.items() if name not in self.emptied}
        for name, keys in self.removed.items():
            gone = set(keys)
            after[name] = {key: value for key, value in after.get(name, {}).items() if key not in gone}
        for name, values in self.set.items():
            after[name] = {**after.get(name, {}), **values}
        return {name: section for name, section in after.items() if section}

    def __add__(self, other: Change) -> Change:
        """Both, of which the other one removes nothing that this one has set.

        :raises ValueError: if it does.
        """
        clash = [name for name in other.emptied if name in self.set]
        clash += [name for name, keys in other.removed.items() if set(keys) & set(self.set.get(name, ()))]
        if clash:
            raise ValueError(f"a change of {', '.join(clash)} would be taken back")
        names = [*self.set, *(name for name in other.set if name not in self.set)]
        removed = [*self.removed, *(name for name in other.removed if name not in self.removed)]
        return Change(
            {name: {**self.set.get(name, {}), **other.set.get(name, {})} for name in names},
            {name: [*self.removed.get(name, ()), *other.removed.get(name, ())] for name in removed},
            [*self.emptied, *other.emptied],
        )

    def to_dict(self) -> dict[str, Any]:
        """The change as JSON values; :meth:`from_dict` reads them back."""
        parts = {"set": self.set, "removed": self.removed, "emptied": self.emptied}
        return {name: part for name, part in parts.items() if part}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Change:
        """Read what :meth:`to_dict` wrote."""
        return cls(**values)


@dataclass(frozen=True)
class Step:
    """Something decided that is to be done beside the log, as often as it takes, and by whoever comes by.

    :param number: of the entry that decided it. Numbers only grow, also from one log of a pipeline to the next: what
        has noted a step's number, as a table can in the same commit as its rows, has it behind it, and all before.
    :param work: what is to be done; JSON values.
    :param then: the change of the entry that says that it has been done.
    """

    number: int
    work: Mapping[str, Any]
    then: Change


def step_of(contents: Contents) -> Step | None:
    """The step that has been decided and not been said to be done."""
    found = contents.get("step")
    return None if not found else Step(found["number"], found["work"], Change.from_dict(found["then"]))


def decided(number: int, work: Mapping[str, Any], then: Change) -> Change:
    """A step is to be carried out."""
    return Change({"step": {"number": number, "work": work, "then": then.to_dict()}})


def carried_out(step: Step) -> Change:
    """A step has been carried out."""
    return step.then + Change(emptied=["step"])


def targets_of(contents: Contents) -> dict[str, Target]:
    """The recorded targets by label."""
    return {label: target_of(contents, label) for label in sorted(contents.get("tables", {}))}


def target_of(contents: Contents, label: str) -> Target:
    """The recorded target of a table."""
    found = contents["tables"][label]
    return Target(Table.from_dict(found["definition"]), found["schema"], found["name"])


def highest(contents: Contents, label: str | None = None) -> LogPosition:
    """The highest H of the reads that have been committed, of one table or of all; 0 without any."""
    chunks = contents.get("chunks", {}).values()
    return max((parse_lsn(c["high"]) for c in chunks if "high" in c and label in (None, _label(c))), default=LOG_START)


def record_of(contents: Contents) -> Record | None:
    """The commit record; ``None`` when there is none."""
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
    """A pipeline begins."""
    head = {"epoch": 0, "owner": "", "applied": format_lsn(start), "advanced": now}
    return Change({"head": head, "source": identity}) + added(targets, chunks)


def restarted(targets: Sequence[Target], identity: Mapping[str, Any], start: LogPosition, now: float) -> Change:
    """A pipeline begins again from another start of the slot."""
    whole = [Chunk(target.table.label, 0, None, None) for target in targets]
    head = {"applied": format_lsn(start), "advanced": now}
    # What a section loses is what it does not get anew: a change removes first, then sets.
    return Change({"head": head, "source": identity}, emptied=["source", "tables", "chunks"]) + added(targets, whole)


def taken(contents: Contents, owner: str, now: float, at_least: int = 0) -> Change:
    """The epoch becomes another: by the clock, so that none comes twice, not even in a record that is made anew."""
    epoch = max(contents["head"]["epoch"] + 1, int(now * 1000), at_least)
    return Change({"head": {"epoch": epoch, "owner": owner}})


def added(targets: Iterable[Target], chunks: Iterable[Chunk]) -> Change:
    """Tables join the pipeline, their chunks unfinished."""
    plans = {chunk_key(chunk): {"definition": chunk.to_dict()} for chunk in chunks}
    return Change({"tables": {target.table.label: _table(target) for target in targets}, "chunks": plans})


def forgotten(contents: Contents, labels: Iterable[str]) -> Change:
    """Tables leave the pipeline."""
    gone = set(labels)
    return Change(removed={"tables": sorted(gone), "chunks": _chunks(contents, gone)})


def redefined(target: Target) -> Change:
    """A target has another definition."""
    return Change({"tables": {target.table.label: _table(target)}})


def noted(values: Mapping[str, Any]) -> Change:
    """The source has moved on."""
    return Change({"source": values})


def chunk_committed(chunk: Chunk, watermark: Watermark, rows: int, epoch: int) -> Change:
    """A chunk's rows are in its table."""
    return Change({"chunks": {chunk_key(chunk): _finished(chunk, None, watermark, rows, epoch)}})


def reread(
    contents: Contents, target: Target, keys: frozenset[tuple[str, ...]] | None, watermark: Watermark, rows: int
) -> Change:
    """The rows with some keys, or all of a table, have been read again; the table is defined as ``target``."""
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
    """The stream has come to ``end``. A re-read of keys is a filter and nothing else; passed, it is forgotten.

    :param values: of the source, noted with it.
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
    """Keys in as many parts as make values of bounded size; one at least."""
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
