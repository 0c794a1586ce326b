"""The commit record of sinks whose store is not a database: contents that change entry by entry.

:mod:`.record_contents` defines the contents and the changes by entries. The store defines how an entry is appended: to
a log of files, or to a topic. A process that appends decides by the store's contents at that moment. So an overtaken
run, whose epoch is no longer in the contents, can append nothing.
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
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
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
    """The commit of an entry.

    :param now: change of the contents with the entry.
    :param work: work to do outside of the log afterwards, see :meth:`LakeRecord._carry_out`; ``None`` for none.
    :param then: change of the contents when the work has been done.
    """

    now: Change = field(default_factory=Change)
    work: Mapping[str, Any] | None = None
    then: Change = field(default_factory=Change)


class ChangesRecord(ABC):
    """A pipeline's commit record.

    :ivar pipeline: name of the pipeline. :ivar mode: ``mirror`` or ``changelog``.
    """

    pipeline: str
    mode: Literal["mirror", "changelog"]

    # -- store --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def place(self) -> str:
        """Return the location of the store, for messages."""

    @abstractmethod
    def _current(self) -> Contents | None:
        """Return the contents of the record; ``None`` if there is none."""

    @abstractmethod
    def _others(self) -> Iterable[tuple[str, Contents]]:
        """Yield the names and contents of other pipelines' records in the store."""

    def _require_store(self) -> None:  # noqa: B027 - not every store has conditions
        """Refuse a store that cannot keep a record; touch nothing."""

    @abstractmethod
    def _begin(self, change: Change, what: str) -> bool:
        """Begin a record.

        :returns: false if there is one already.
        """

    @abstractmethod
    def _append(self, epoch: int | None, what: str, decide: Callable[[Contents], Commit | None]) -> Contents | None:
        """Append an entry, then do the work that it decides.

        :param epoch: epoch of the run; ``None`` to take it, or for entries that need none.
        :param what: the entry's title, for people.
        :param decide: returns the commit for the contents, ``None`` for none. It is called again if another process has
            appended meanwhile, so it must not have side effects.
        :returns: the contents afterwards; ``None`` if there was nothing to commit.
        :raises Fenced: when another run has the epoch.
        """

    # -- targets ------------------------------------------------------------------------------------

    @abstractmethod
    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: LogPosition | None) -> None:
        """Refuse a target that this pipeline may not use; touch nothing.

        :param recorded: the recorded target for this table; ``None`` if it joins.
        :param ours: the target is known to be the pipeline's, although it is not recorded.
        :param start: start of the slot; ``None`` for a table that joins a running pipeline.
        :raises ForeignTable: see :meth:`.contract.Sink.prepare`.
        :raises GateClosed: likewise.
        """

    def _has(self, contents: Contents, target: Target) -> bool:
        """Return whether another pipeline's record has a target that is the same as ``target`` in the store."""
        own = self._known_as(target.schema, target.name)
        tables = contents.get("tables", {}).values()
        return any(self._known_as(table["schema"], table["name"]) == own for table in tables)

    def _known_as(self, schema: str, name: str) -> Hashable:
        """Return what identifies a target in the store."""
        return schema, name

    def _require_apart(self, targets: Sequence[Target]) -> None:  # noqa: B027 - few stores need it
        """Refuse targets of the pipeline that would be the same in the store.

        :raises ConfigError: naming two.
        """

    def _create(self, targets: Sequence[Target]) -> None:  # noqa: B027 - few stores need it
        """Create what targets need before they are recorded: empty tables, or nothing. Idempotent."""

    def _described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        """Return the change of the sink's own sections for targets that join, or begin again.

        :param contents: contents before the change; empty for a pipeline that begins.
        :param ours: labels of targets that are known to be the pipeline's, although they are not recorded.
        """
        return Change()

    def _fit(self, contents: Contents, targets: Sequence[Target]) -> Mapping[str, Any] | None:
        """Return the work that gives recorded targets the columns of ``targets``; all their rows will be replaced."""
        return None

    # -- the record ---------------------------------------------------------------------------------

    def _contents(self, epoch: int | None) -> Contents:
        """Return the contents of the record.

        :param epoch: epoch of the run; ``None`` for any.
        :raises Fenced: when another run has the epoch, or the record no longer exists.
        """
        return self._owned(self._current(), epoch)

    def _owned(self, contents: Contents | None, epoch: int | None) -> Contents:
        """Return the contents if they exist and have the epoch."""
        if contents is None:
            raise Fenced(
                f"the sink {self.place} has no commit record of pipeline {self.pipeline} anymore",
                "If the pipeline was dropped, no action is needed. Otherwise start the pipeline again; it will report"
                " what to do next.",
            )
        current = contents["head"]["epoch"]
        if epoch is not None and current != epoch:
            raise Fenced.by(f"pipeline {self.pipeline} in {self.place} is at", current, epoch)
        return contents

    def record(self) -> Record | None:
        """Return the commit record; ``None`` if there is none."""
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
        """Create the commit record, and create or accept targets."""
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
        """Refuse recorded or other targets that this pipeline may not use; touch nothing.

        :raises CdcError: as :meth:`.contract.Sink.prepare`.
        """
        self._check(targets, record_contents.targets_of(self._current() or {}))

    def add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        """Add tables to the commit record, and create or accept their targets."""
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
        """Begin again at another start of the slot, with every table as one unfinished chunk."""
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
        """Remove tables from the commit record."""
        if labels:
            self._append(
                epoch, "tables forgotten", lambda contents: Commit(record_contents.forgotten(contents, labels))
            )

    def record_source(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Change values of the record's ``identity``."""
        self._append(epoch, "source noted", lambda contents: Commit(record_contents.noted(values)))

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """Make ``owner`` the only process that may commit, then complete a step that an earlier run has decided.

        :raises CdcError: when the step cannot be completed; the epoch has been taken nevertheless.
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
        """Check the epoch before and after the block, because this store cannot keep others from taking it.

        A run that is overtaken within the block may therefore still do the work in it; it gets the error afterwards.
        """
        self._contents(epoch)
        yield
        self._contents(epoch)

    # -- checks of every commit ---------------------------------------------------------------------

    def _is_open(self, contents: Contents, chunk: Chunk, origin: ServerIdentity) -> bool:
        """Return whether a chunk still has to be committed.

        :raises StreamFailed: when it was read from a server other than the pipeline's current one.
        """
        require_origin(chunk, origin, ServerIdentity.of(contents["source"]))
        recorded = contents.get("chunks", {}).get(record_contents.chunk_key(chunk))
        return recorded is not None and "snapshot" not in recorded

    def _is_next(self, contents: Contents, start: LogPosition, end: LogPosition, pieces: Sequence[StagedPiece]) -> bool:
        """Return whether the unit ``(start, end]`` still has to be committed.

        :raises GateClosed: when it does not begin where the record ends.
        :raises StagingLost: when rows were read again after staging; the unit would undo changes in them.
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
        """Refuse targets that this pipeline may not use; touch nothing.

        :param recorded: recorded targets by label; their tables stay in the pipeline, unless all begin again.
        :param start: start of the slot; ``None`` for tables that join a running pipeline.
        :param ours: labels of targets that are known to be the pipeline's, although they are not recorded.
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
                    "Give this pipeline another target schema (`sink.schema`). Or, if the other pipeline is not needed"
                    " anymore, run `airflow-cdc drop` with its file, then try again.",
                )
