"""The Kafka sink: changes of tables as messages of their topics, each unit in all of them or in none.

Tasks write messages, as they will be, into the pipeline's staging topic. The driver takes them from there and writes
them into their topics, and what follows for the record into its own, in one transaction: consumers that read what is
committed see each change once, and a unit in all topics or in none, if not at the same moment: the brokers mark the
end of a transaction in one partition after the other. Overtaken runs are fenced by the brokers, see
:mod:`.transactions`.
"""

from __future__ import annotations

import json
import random
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import Key, Sides
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import CannotFollow, ConfigError, StagingLost, StreamFailed, UnknownTable
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.kafka.cluster import Cluster, Topic
from airflow_cdc_provider.engine.kafka.message_ranges import MessageRange
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.kafka import events, truncate_events
from airflow_cdc_provider.engine.sinks.kafka.record_topic import PREFIX, Journal, written
from airflow_cdc_provider.engine.sinks.kafka.settings import KafkaSettings
from airflow_cdc_provider.engine.sinks.kafka.staged_messages import pack, unpack
from airflow_cdc_provider.engine.sinks.kafka.staging_topic import CHUNKS, SUFFIX, UNITS, Blob, Staging, require
from airflow_cdc_provider.engine.sinks.kafka.target_topics import TargetTopics, id_told, last_told, telling
from airflow_cdc_provider.engine.sinks.kafka.transactions import Batch, Overtaken, Unsure, Writer, end_all
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.append_only import AppendOnly, only
from airflow_cdc_provider.engine.sinks.record_log.read_position import Room, room_at
from airflow_cdc_provider.engine.sinks.record_log.record import ChangesRecord, Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, RowsNeeded, Staged, StagedPiece

_TRIES = 10
_PAUSE = 0.5  # seconds at most, before another try
_MARGIN = 10.0  # seconds after its timeout in which the brokers have ended a transaction


@dataclass(frozen=True)
class Written:
    """Rows that have been read from the source and staged, and not been committed yet.

    :param id: by which the record tells that they are in it.
    :param topic: for which they are.
    :param room: where they stand in the changelog.
    :param replacing: they replace what the topic amounts to, if it amounts to anything.
    :param emptied: the number of a truncate before them that is not a message.
    """

    id: str
    topic: Topic
    blobs: tuple[Blob, ...]
    room: Room
    replacing: bool
    rows: int
    watermark: Watermark
    emptied: int | None = None


@dataclass(frozen=True)
class KafkaSink(ChangesRecord, AppendOnly):
    """A pipeline's topics in a cluster; see :class:`.contract.Sink`.

    :param part: of the run, which writes at the same time as others.
    """

    settings: KafkaSettings
    pipeline: str
    part: str = ""
    mode: Literal["mirror", "changelog"] = "changelog"

    # -- the cluster --------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """The cluster that the settings name."""
        return Cluster(self.settings.brokers, self.settings.properties)

    @property
    def place(self) -> str:
        """See :attr:`.ChangesRecord.place`."""
        return self.settings.place

    @property
    def journal(self) -> Journal:
        """The record's topic."""
        return Journal(self.cluster, self.pipeline)

    @property
    def staging(self) -> Staging:
        """The topic of what is staged."""
        return Staging(self.cluster, self.pipeline)

    @property
    def topics(self) -> TargetTopics:
        """The topics of the targets."""
        return TargetTopics(self.settings, self.pipeline)

    def identity(self) -> Mapping[str, Any]:
        """See :meth:`.contract.Sink.identity`: the number that the cluster was given when it was made."""
        return {"cluster": self.cluster.id()}

    # -- transactions -------------------------------------------------------------------------------

    def _current(self) -> Contents | None:
        return self.journal.contents()

    def _others(self) -> Iterable[tuple[str, Contents]]:
        for topic in self.cluster.topics():
            pipeline = topic.removeprefix(PREFIX)
            if topic.startswith(PREFIX) and not topic.endswith(SUFFIX) and pipeline != self.pipeline:
                yield pipeline, Journal(self.cluster, pipeline).others() or {}

    def _require_store(self) -> None:
        """See :meth:`.ChangesRecord._require_store`: brokers with which no transaction can be begun are refused."""
        self.probe().end()

    def _begin(self, change: Change, what: str) -> bool:
        self.journal.create(self.settings.replicas)
        self.staging.create(self.settings.replicas)

        def decide(contents: Contents | None) -> Commit | None:
            return Commit(change) if contents is None else None

        return self._transact(self._writer(), what, decide) is not None

    def _append(self, epoch: int | None, what: str, decide: Callable[[Contents], Commit | None]) -> Contents | None:
        """See :meth:`.ChangesRecord._append`.

        What other parts have open is ended before, so that nothing is waited for, and afterwards, when who has decided
        by what was so before may be about to commit.
        """
        end_all(self._writers(self._contents(epoch)))
        appended = self._transact(self._writer(), what, lambda contents: decide(self._owned(contents, epoch)))
        if appended is not None:
            end_all(self._writers(appended))
        return appended

    def _commit(
        self,
        epoch: int,
        what: str,
        decide: Callable[[Contents], Commit | None],
        data: Callable[[], Iterable[Batch]],
    ) -> Contents | None:
        """Commit messages, and what has been decided, under the part's own ``transactional.id``.

        Parts that write at the same time decide what does not depend on the others.
        """
        self._join(epoch)
        return self._transact(
            self._writer(self.part), what, lambda contents: decide(self._owned(contents, epoch)), data
        )

    def _join(self, epoch: int) -> None:
        """Have the part's ``transactional.id`` in the record, so that who takes the epoch ends what is open there."""

        def decide(contents: Contents) -> Commit | None:
            known = self.part in contents.get("writers", {})
            return None if known else Commit(Change({"writers": {self.part: True}}))

        if self.part and decide(self._contents(epoch)) is not None:
            # Nothing of other parts has to end for it: those that write at the same time would abort each other's.
            self._transact(self._writer(), f"{self.part} writes", lambda contents: decide(self._owned(contents, epoch)))

    def _writer(self, part: str = "") -> Writer:
        name = f"{PREFIX}{self.pipeline}" + (f".{part}" if part else "")
        return Writer(self.cluster, name, self.settings.transaction_timeout)

    def probe(self) -> Writer:
        """One that no run has, to see whether transactions can be begun."""
        return self._writer("preflight")

    def _writers(self, contents: Contents) -> list[Writer]:
        return [self._writer(part) for part in contents.get("writers", {})]

    def _transact(
        self,
        writer: Writer,
        what: str,
        decide: Callable[[Contents | None], Commit | None],
        data: Callable[[], Iterable[Batch]] = tuple,
    ) -> Contents | None:
        """Decide by what the record holds, and commit that.

        :param what: is done, for people who read the topic.
        :returns: what the record holds afterwards; ``None`` when there was nothing to commit.
        """
        late, unsure = 0, None
        with writer.alone():
            for tried in range(_TRIES):
                if tried:
                    time.sleep(random.uniform(0, _PAUSE))  # or two would take it from each other in step
                writer.take()
                contents = self.journal.contents(self.settings.transaction_timeout + _MARGIN)
                commit = decide(contents)
                if commit is None:
                    return None
                try:
                    writer.commit(self.journal, what, written(commit.now, contents or {}), data())
                except Overtaken as e:
                    late += e.seconds > writer.timeout
                    if late > 1:
                        raise writer.too_long(e.seconds) from e
                except Unsure as e:
                    unsure = e  # what the record says tells how it has ended
                else:
                    # A transaction is committed a moment before readers are shown it: then they are, all of them.
                    return self.journal.contents(self.settings.transaction_timeout + _MARGIN)
        if unsure is not None:
            raise self.cluster.unreachable(
                f"transactions under {writer.id} do not come to an end, after {_TRIES} tries: {unsure}"
            ) from unsure
        raise StreamFailed(
            f"others have taken {writer.id} {_TRIES} times while this run was about to commit",
            "See that no two runs of the pipeline have the same part; then start again.",
        )

    # -- targets ------------------------------------------------------------------------------------

    def _require_apart(self, targets: Sequence[Target]) -> None:
        self.topics.require_apart(targets)

    def _has(self, contents: Contents, target: Target) -> bool:
        tables = contents.get("tables", {})
        own = self.topics.name(target)
        return any(told["topic"] == own for label, told in contents.get("topics", {}).items() if label in tables)

    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: int | None) -> None:
        topics = self.topics
        topics.format.require(target)
        if recorded is not None:
            topics.require_before(target, last_told(self._current() or {}, target), start)
        elif ours:
            topics.require_before(target, topics.last_event(target), start)
        else:
            topics.require_ours(target)

    def _create(self, targets: Sequence[Target]) -> None:
        self.topics.create(targets)

    def _described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        return self.topics.described(contents, targets, ours)

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """See :meth:`.contract.Sink.missing`; a topic that was made anew has lost its messages as well."""
        return self.topics.missing(self._current() or {}, targets)

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """See :meth:`.contract.Sink.redefine`. Messages stay as they are; those to come have the columns of then."""
        failpoint("before-redefinition")
        try:
            self.topics.format.require(after)
        except ConfigError as e:
            raise CannotFollow(e.message, e.solution) from e
        change = redefinition(before.table, after.table)
        for column in change.added:
            if column.missing is not None:
                raise RowsNeeded(f"rows of before have {column.missing!r} in the added column {column.name}")
        if change.renamed or change.replaced:
            raise RowsNeeded("messages keep the names of the columns that they have")
        if change.retyped:
            raise RowsNeeded("messages keep the types of the columns that they have")
        self._append(epoch, f"{after.table.label} redefined", lambda contents: Commit(record_contents.redefined(after)))
        failpoint("after-redefinition")

    # -- the record ---------------------------------------------------------------------------------

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """See :meth:`.contract.Sink.take_epoch`."""
        self.journal.require()
        epoch = super().take_epoch(owner, at_least)
        self.staging.create(self.settings.replicas)
        return epoch

    def end_sessions(self) -> None:
        """See :meth:`.contract.Sink.end_sessions`: transactions that are open are ended, and none goes on."""
        writers = [self._writer(self.part)]
        if not self.part:
            writers += self._writers(self._current() or {})
        for writer in writers:
            writer.leave()
        end_all(writers)

    def sweep(self, epoch: int) -> None:
        """See :meth:`.contract.Sink.sweep`; chunks stay, but for those that earlier runs have left."""
        if self._is_at(epoch):
            self.staging.clear(UNITS)
            self.staging.clear_before(CHUNKS, epoch)

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """See :meth:`.contract.Sink.deposit`."""
        self._contents(epoch)
        self.staging.deposit(epoch, name, data)

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """See :meth:`.contract.Sink.fetch`."""
        self._contents(epoch)
        blob = self.staging.deposited(epoch).get(name)
        return require(bytearray() if blob is None else self.staging.read(blob), size, blob is not None)

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """See :meth:`.contract.Sink.discard`."""
        if self._is_at(epoch):
            if names is None:
                self.staging.discard_all()
            else:
                self.staging.discard(epoch, names)

    def _is_at(self, epoch: int) -> bool:
        contents = self._current()
        return contents is not None and contents["head"]["epoch"] == epoch

    def drop(self) -> None:
        """See :meth:`.contract.Sink.drop`."""
        contents = self._current() or {}
        end_all([self._writer(), *self._writers(contents)])
        self.cluster.remove(self.journal.topic)
        self.cluster.remove(self.staging.topic)

    # -- chunks and re-reads -----------------------------------------------------------------------

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: Origin,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> Written | None:
        """See :meth:`.contract.Sink.write_chunk`."""
        contents = self._contents(epoch)
        if not self._is_open(contents, chunk, origin):
            return None
        failpoint("before-chunk-staged")
        found = self._stage_rows(epoch, contents, target, None if chunk.whole else (), batches, finish)
        failpoint("after-chunk-staged")
        return found

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        """See :meth:`.contract.Sink.commit_chunks`; all in one transaction."""
        chosen: list[CopiedChunk] = []

        def decide(contents: Contents) -> Commit | None:
            chosen.clear()
            change = Change()
            for each in copied:
                if self._is_open(contents, each.chunk, each.origin) and each.chunk not in [c.chunk for c in chosen]:
                    self._require_room(contents, each.target, each.written)
                    found: Written = each.written
                    change += record_contents.chunk_committed(each.chunk, found.watermark, found.rows, epoch)
                    change += self._read_change(contents, each.target, found)
                    chosen.append(each)
            return Commit(change) if chosen else None

        def data() -> Iterator[Batch]:
            for each in chosen:
                yield from self._batches(self.topics.name(each.target), each.written.blobs)
            failpoint("before-chunk-commit")

        failpoint("before-chunk-prepared")
        title = ", ".join(each.chunk.title for each in copied)
        committed = chosen if self._commit(epoch, f"chunks {title}", decide, data) is not None else []
        failpoint("after-chunk-commit")
        self.staging.release(chain.from_iterable(each.written.blobs for each in copied))
        return [each.written.rows if any(each is c for c in committed) else None for each in copied]

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
        before: Target | None,
    ) -> int:
        """See :meth:`.contract.Sink.replace`."""
        contents = self._contents(epoch)
        if before is None:
            self._check([target], record_contents.targets_of(contents))
        else:
            self.topics.format.require(target)
        if keys is not None:
            batches = (only(target, keys, batch) for batch in batches)
        found = self._stage_rows(epoch, contents, target, keys, batches, finish)
        if found.topic.id != id_told(contents, target):
            # A producer takes a topic that was made anew for one of which it knows more than the brokers do.
            self._writer(self.part).leave()

        def decide(contents: Contents) -> Commit | None:
            if contents.get("reads", {}).get(target.table.label, {}).get("id") == found.id:
                return None  # a try has committed them whose end was not known
            self._require_room(contents, target, found)
            read = record_contents.reread(contents, target, keys, found.watermark, found.rows)
            return Commit(read + self._read_change(contents, target, found))

        def data() -> Iterator[Batch]:
            yield from self._batches(self.topics.name(target), found.blobs)
            failpoint("before-reread-commit")

        self._commit(epoch, f"{target.table.label} read again", decide, data)
        failpoint("after-reread-commit")
        self.staging.release(found.blobs)
        return found.rows

    def _stage_rows(
        self,
        epoch: int,
        contents: Contents,
        target: Target,
        keys: Collection[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> Written:
        """Stage rows that were read from the source, and before them what they replace.

        :param keys: of the rows that they replace, ``None`` for all.
        """
        if keys is None:
            self._create([target])
        topic = self.topics.require({} if keys is None else contents, target)
        lsn = parse_lsn(contents["head"]["applied"])
        replacing = keys is None or bool(keys)
        room = _room(contents, target, lsn, replacing)
        now = int(time.time() * 1_000_000)
        blobs, rows = [], 0
        emptied = room.marker if keys is None and not self.settings.truncates else None
        if room.marker is not None and keys is None and emptied is None:
            blobs.append(self._put(CHUNKS, epoch, target, topic, events.truncate(target, lsn, room.marker, now)))
        elif room.marker is not None and keys:
            gone = events.deletes(target, sorted(keys), lsn, room.marker, now)
            blobs.append(self._put(CHUNKS, epoch, target, topic, gone))
        for batch in batches:
            if batch.num_rows:
                read = events.read_rows(target, batch, lsn, room.seq, now)
                blobs.append(self._put(CHUNKS, epoch, target, topic, read))
                rows += batch.num_rows
        return Written(uuid.uuid4().hex, topic, tuple(blobs), room, replacing, rows, finish(), emptied)

    def _read_change(self, contents: Contents, target: Target, found: Written) -> Change:
        """What the record says of rows that were read."""
        label, room = target.table.label, found.room
        read = {"lsn": format_lsn(room.lsn), "seq": room.seq, "id": found.id}
        last = room.lsn if found.blobs else last_told(contents, target)
        change = Change({"reads": {label: read}, "topics": {label: telling(found.topic.name, last, found.topic.id)}})
        return (
            change
            if found.emptied is None
            else change + truncate_events.note(label, found.topic.id, room.lsn, found.emptied)
        )

    def _require_room(self, contents: Contents, target: Target, found: Written) -> None:
        """Refuse rows that do not come behind all that is in the topic by now.

        :raises StagingLost: when the stream has gone on, or the table was read again, since they were staged.
        """
        applied = parse_lsn(contents["head"]["applied"])
        room = _room(contents, target, applied, found.replacing)
        if applied != found.room.lsn or room.seq > found.room.seq:
            raise StagingLost(
                f"rows of {target.table.label} were staged for {format_lsn(found.room.lsn)}, but the topic has gone on"
                f" to {format_lsn(applied)}",
                "Start again: the rows are read anew.",
            )

    # -- stream units ------------------------------------------------------------------------------

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """See :meth:`.contract.Sink.stage`."""
        if not effects:
            return ()
        contents = self._contents(epoch)
        partition = UNITS[zlib.crc32(attempt.encode()) % len(UNITS)]
        staged = []
        for effect in effects:
            target, relation = record_contents.target_of(contents, effect.label), None
            if effect.rows.num_rows:
                topic = self.topics.require(contents, target)
                rows, truncate = (effect.rows, None) if self.settings.truncates else truncate_events.told(effect.rows)
                blob = self._put(partition, epoch, target, topic, events.settled(target, rows)) if len(rows) else None
                told = {"last": pc.max(effect.rows.column("commit_lsn")).as_py(), "truncate": truncate}
                relation = json.dumps({"blob": None if blob is None else blob.to_dict(), **told})
            columns = tuple(effect.rows.column_names)
            staged.append(Staged(effect.label, relation, effect.rows.num_rows, effect.truncate, columns))
        failpoint("before-batch-staged")
        failpoint("after-batch-staged")
        return tuple(staged)

    def commit(
        self,
        epoch: int,
        start: int,
        end: int,
        pieces: Sequence[StagedPiece],
        noted: Mapping[str, Any] | None = None,
    ) -> bool:
        """See :meth:`.contract.Sink.commit`."""
        failpoint("before-batch-commit")
        staged = chain.from_iterable(piece.tables for piece in sorted(pieces, key=lambda piece: piece.index))
        told = [(each.label, json.loads(each.relation)) for each in staged if each.relation is not None]
        found = [(label, Blob.from_dict(relation["blob"])) for label, relation in told if relation["blob"]]
        truncates = {label: relation["truncate"] for label, relation in told if relation["truncate"]}
        lasts: dict[str, int] = {}
        for label, relation in told:
            lasts[label] = max(lasts.get(label, 0), relation["last"])
        targets: dict[str, Target] = {}

        def decide(contents: Contents) -> Commit | None:
            if not self._is_next(contents, start, end, pieces):
                return None
            targets.update({label: record_contents.target_of(contents, label) for label in lasts})
            topics = {
                label: telling(self.topics.name(targets[label]), last, id_told(contents, targets[label]))
                for label, last in lasts.items()
            }
            change = record_contents.unit_applied(contents, end, time.time(), noted) + Change({"topics": topics})
            for label, (lsn, seq) in truncates.items():
                change += truncate_events.note(label, topics[label]["id"], lsn, seq)
            return Commit(change)

        def data() -> Iterator[Batch]:
            for label, blob in found:
                yield from self._batches(self.topics.name(targets[label]), [blob])
            failpoint("in-batch-commit")

        title = f"unit ({format_lsn(start)}, {format_lsn(end)}]"
        applied = self._commit(epoch, title, decide, data) is not None
        failpoint("after-batch-commit")
        self.staging.release(blob for _, blob in found)
        return applied

    def _put(self, partition: int, epoch: int, target: Target, topic: Topic, rows: pa.Table) -> Blob:
        """Stage events, as the messages that they will be.

        :param partition: of the staging topic.
        """
        messages = self.topics.format.encode(target, topic.name, rows)
        return self.staging.write(partition, epoch, pack(messages, topic.partitions))

    def _batches(self, topic: str, blobs: Iterable[Blob]) -> Iterator[Batch]:
        for blob in blobs:
            yield from unpack(topic, self.staging.read(blob))

    # -- comparing ---------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """See :meth:`.contract.Sink.compared`."""
        if self.missing([target]):
            raise UnknownTable(
                f"the topic {self.topics.name(target)} of the target {target.schema}.{target.name} is gone",
                f"Run `airflow-cdc resnapshot --table '{target.table.label}'`.",
            )
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[Key] | None = None) -> Iterator[pa.RecordBatch]:
        """All events of a target's topic that are ours, committed, and still there.

        :param keys: all events come, whatever the keys.
        """
        return self.topics.events(self._current() or {}, target)

    def ranges(self, target: Target) -> Sequence[MessageRange]:
        """See :meth:`.Numbered.ranges`."""
        return self.topics.ranges(self._current() or {}, target)


def _room(contents: Contents, target: Target, lsn: int, replacing: bool) -> Room:
    """Where rows that are read now stand.

    :param lsn: the applied LSN.
    :param replacing: they replace what the topic amounts to.
    """
    read = contents.get("reads", {}).get(target.table.label)
    last = int(read["seq"]) if read is not None and parse_lsn(read["lsn"]) == lsn else None
    return room_at(lsn, last, replacing and last_told(contents, target) is not None)
