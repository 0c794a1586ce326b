"""The commit record of sinks whose store is no database: contents that are changed entry by entry.

What the contents are and how an entry changes them is said by :mod:`.record_contents`, and how it is appended by the
store: a log of files, or a topic. Whoever appends decides by what the store holds at that moment; so an overtaken run,
whose epoch that does not say any more, can append nothing.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import (
    Fenced,
    ForeignTable,
)
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, parse_lsn
from airflow_cdc_provider.engine.core.record import Record, Target
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.protocol_errors import (
    provisioned_meanwhile,
    read_again_since,
    require_adjoining,
    require_origin,
)
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.sinks.staged import StagedPiece


@dataclass(frozen=True)
class Commit:
    """What an entry commits.

    :param now: changes the contents with the entry.
    :param work: is then to be carried out beside the log, see :meth:`LakeRecord._carry_out`; ``None`` for nothing.
    :param then: changes the contents when that has been done.
    """

    now: Change = field(default_factory=Change)
    work: Mapping[str, Any] | None = None
    then: Change = field(default_factory=Change)


class ChangesRecord(ABC):
    """A pipeline's commit record.

    :ivar pipeline: name of the pipeline.
    :ivar mode: ``mirror`` or ``changelog``.
    """

    pipeline: str
    mode: Literal["mirror", "changelog"]

    # -- what a store does --------------------------------------------------------------------------

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the store is, for messages."""

    @abstractmethod
    def _current(self) -> Contents | None:
        """What the record holds; ``None`` when there is none."""

    @abstractmethod
    def _others(self) -> Iterable[tuple[str, Contents]]:
        """What the records of other pipelines in the store hold, by their names."""

    def _require_store(self) -> None:  # noqa: B027 - not every store has conditions
        """Refuse a store that cannot keep a record; touch nothing."""

    @abstractmethod
    def _begin(self, change: Change, what: str) -> bool:
        """Begin a record.

        :returns: false when there is one already.
        """

    @abstractmethod
    def _append(self, epoch: int | None, what: str, decide: Callable[[Contents], Commit | None]) -> Contents | None:
        """Append an entry, then carry out what it decides.

        :param epoch: of the run; ``None`` for who takes it, or needs none.
        :param what: the entry's title, for people.
        :param decide: says from the contents what is to be committed, ``None`` for nothing. Called again when another
            has appended meanwhile, so it must do nothing but decide.
        :returns: the contents afterwards; ``None`` when nothing was to be committed.
        :raises Fenced: when the epoch is another's.
        """

    # -- what a sink does beside the record ---------------------------------------------------------

    @abstractmethod
    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: LogPosition | None) -> None:
        """Refuse a target that is not there for this pipeline; touch nothing.

        :param recorded: the target of the record for this table; ``None`` when it joins.
        :param ours: the target is known to be the pipeline's, although no record says so.
        :param start: where the slot begins; ``None`` for a table that joins a running pipeline.
        :raises ForeignTable: see :meth:`.contract.Sink.prepare`.
        :raises GateClosed: likewise.
        """

    def _has(self, contents: Contents, target: Target) -> bool:
        """Whether what another pipeline's record holds has a target that the store takes for ``target``."""
        own = self._known_as(target.schema, target.name)
        tables = contents.get("tables", {}).values()
        return any(self._known_as(table["schema"], table["name"]) == own for table in tables)

    def _known_as(self, schema: str, name: str) -> Hashable:
        """By what the store tells a target from others."""
        return schema, name

    def _require_apart(self, targets: Sequence[Target]) -> None:  # noqa: B027 - nor takes two for one
        """Refuse targets of the pipeline that the store takes for one.

        :raises ConfigError: naming two.
        """

    def _create(self, targets: Sequence[Target]) -> None:  # noqa: B027 - nor has empty tables
        """Make what targets need before the record tells of them: empty tables, or nothing. Idempotent."""

    def _described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        """What the sink's own sections say of targets that join, or begin again.

        :param contents: before; empty for a pipeline that begins.
        :param ours: labels of targets that are known to be the pipeline's, although no record says so.
        """
        return Change()

    def _fit(self, contents: Contents, targets: Sequence[Target]) -> Mapping[str, Any] | None:
        """The work that gives recorded targets, all of whose rows will be replaced, the columns of ``targets``."""
        return None

    # -- the record ---------------------------------------------------------------------------------

    def _contents(self, epoch: int | None) -> Contents:
        """What the record holds.

        :param epoch: of the run; ``None`` for any.
        :raises Fenced: when the epoch is another's, or there is no record any more.
        """
        return self._owned(self._current(), epoch)

    def _owned(self, contents: Contents | None, epoch: int | None) -> Contents:
        """The contents, if they are there and the epoch's."""
        if contents is None:
            raise Fenced(
                f"the sink {self.place} has no commit record of pipeline {self.pipeline} any more",
                "Nothing to do if the pipeline has been dropped; otherwise start it again, and it says what helps.",
            )
        current = contents["head"]["epoch"]
        if epoch is not None and current != epoch:
            raise Fenced.by(f"pipeline {self.pipeline} in {self.place} is at", current, epoch)
        return contents

    def record(self) -> Record | None:
        """See :meth:`.contract.Sink.record`."""
        contents = self._current()
        return None if contents is None else record_contents.record_of(contents)

    def prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: LogPosition,
        ours: Collection[str] = (),
        rehearsal: bool = False,
    ) -> None:
        """See :meth:`.contract.Sink.prepare`."""
        self._require_store()
        self._check(targets, {}, start, ours)
        begun = provisioned_meanwhile(self.pipeline)
        if self._current() is not None:
            raise begun
        if rehearsal:
            return
        self._create(targets)
        failpoint("before-plan")
        plan = record_contents.provisioned(targets, chunks, identity, start, time.time())
        plan += self._described({}, targets, ours)
        if not self._begin(plan, "provisioned"):
            raise begun
        failpoint("after-plan")

    def check_targets(self, targets: Sequence[Target]) -> None:
        """Refuse targets, recorded ones or others, that are not there for this pipeline; touch nothing.

        :raises CdcError: as :meth:`.contract.Sink.prepare`.
        """
        self._check(targets, record_contents.targets_of(self._current() or {}))

    def add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        """See :meth:`.contract.Sink.add`."""
        self._check(targets, record_contents.targets_of(self._contents(epoch)))
        self._create(targets)
        failpoint("before-plan")

        def decide(contents: Contents) -> Commit:
            return Commit(record_contents.added(targets, chunks) + self._described(contents, targets, ()))

        self._append(epoch, "tables added", decide)
        failpoint("after-plan")

    def restart(
        self,
        epoch: int,
        targets: Sequence[Target],
        identity: Mapping[str, Any],
        start: LogPosition,
        rehearsal: bool = False,
    ) -> None:
        """See :meth:`.contract.Sink.restart`."""
        recorded = record_contents.targets_of(self._contents(epoch))
        self._check(targets, recorded, start)
        if rehearsal:
            return
        self._create([target for target in targets if target.table.label not in recorded])

        def decide(contents: Contents) -> Commit:
            begins = record_contents.restarted(targets, identity, start, time.time())
            begins += self._described(contents, targets, ())
            work = self._fit(contents, targets)
            return Commit(begins) if work is None else Commit(work=work, then=begins)

        self._append(epoch, "restarted", decide)

    def forget(self, epoch: int, labels: Sequence[str]) -> None:
        """See :meth:`.contract.Sink.forget`."""
        if labels:
            self._append(
                epoch, "tables forgotten", lambda contents: Commit(record_contents.forgotten(contents, labels))
            )

    def note_source(self, epoch: int, values: Mapping[str, Any]) -> None:
        """See :meth:`.contract.Sink.note_source`."""
        self._append(epoch, "source noted", lambda contents: Commit(record_contents.noted(values)))

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """See :meth:`.contract.Sink.take_epoch`; what an earlier run has decided is then carried out, and in the
        record.

        :raises CdcError: when it cannot be. The epoch has been taken all the same.
        """
        failpoint("before-epoch")
        taken: list[int] = []

        def decide(contents: Contents) -> Commit:
            change = record_contents.taken(contents, owner, time.time(), at_least)
            taken.append(change.set["head"]["epoch"])
            return Commit(change)

        self._append(None, f"epoch taken by {owner}", decide)
        failpoint("after-epoch")
        return taken[-1]

    @contextmanager
    def fenced(self, epoch: int) -> Iterator[None]:
        """See :meth:`.contract.Sink.fenced`. Nobody can be kept from taking it: it is looked at, before and afterwards.

        What is done beside the sink may therefore be done by a run that is overtaken right then; it is told afterwards.
        """
        self._contents(epoch)
        yield
        self._contents(epoch)

    # -- what every commit asks ---------------------------------------------------------------------

    def _is_open(self, contents: Contents, chunk: Chunk, origin: Origin) -> bool:
        """Whether a chunk is still to be committed.

        :raises StreamFailed: when it was read from another server than the one that the pipeline has gone on to.
        """
        require_origin(chunk, origin, Origin.of(contents["source"]))
        recorded = contents.get("chunks", {}).get(record_contents.chunk_key(chunk))
        return recorded is not None and "snapshot" not in recorded

    def _is_next(self, contents: Contents, start: LogPosition, end: LogPosition, pieces: Sequence[StagedPiece]) -> bool:
        """Whether the unit ``(start, end]`` is still to be committed.

        :raises GateClosed: when it does not begin where the record ends.
        :raises StagingLost: when rows were read again since it was staged: they hold changes that it would take back.
        """
        applied = parse_lsn(contents["head"]["applied"])
        if applied >= end:
            return False
        require_adjoining(self.pipeline, start, end, applied)
        high = min((piece.high for piece in pieces), default=None)
        if high is not None and record_contents.highest(contents) > high:
            labels = [label for label in contents.get("tables", {}) if record_contents.highest(contents, label) > high]
            raise read_again_since(", ".join(labels))
        return True

    def _check(
        self,
        targets: Sequence[Target],
        recorded: Mapping[str, Target],
        start: LogPosition | None = None,
        ours: Collection[str] = (),
    ) -> None:
        """Refuse targets that are not there for this pipeline; touch nothing.

        :param recorded: by label; tables stay beside those of ``targets``, unless all begin.
        :param start: where the slot begins; ``None`` for tables that join a running pipeline.
        :param ours: labels of targets that are known to be the pipeline's, although no record says so.
        """
        staying = recorded if start is None else {}
        self._require_apart(list({**staying, **{target.table.label: target for target in targets}}.values()))
        others = list(self._others())
        for target in targets:
            self._refuse_anothers(target, others)
            self._check_target(target, recorded.get(target.table.label), target.table.label in ours, start)

    def _refuse_anothers(self, target: Target, others: Iterable[tuple[str, Contents]]) -> None:
        """Refuse a target, with rows or without, into which another pipeline copies."""
        for pipeline, contents in others:
            if self._has(contents, target):
                raise ForeignTable(
                    f"the target table {target.schema}.{target.name} belongs to pipeline {pipeline!r}",
                    "Give this pipeline another target schema (`sink.schema`); or, if the other one is not needed any"
                    " more, run `airflow-cdc drop` with its file, then try again.",
                )
