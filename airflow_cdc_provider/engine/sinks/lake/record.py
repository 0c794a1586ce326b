"""The commit record of sinks whose store has files and no transactions: a log beside the tables.

It is the ground truth of a pipeline, ``<root>/_airflow_cdc/<pipeline>/log``, see :mod:`.log`. A sink whose commit is
one entry, such as one that names files, has its unit in the same step as the record. One whose commit changes several
objects, such as tables with logs of their own, decides by an entry what is to be done, which is when the unit is
committed, then does it, and says so by another entry. Whoever comes in between, be it after a crash, does it first.
The record tells of a unit when that has been done: what it says is in the tables.

Nobody has to be waited for, nor ended: an overtaken run cannot append.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from airflow_cdc_provider.engine.chunks import Chunk
from airflow_cdc_provider.engine.errors import Fenced, ForeignTable, GateClosed, SecondWriter, StagingLost, StreamFailed
from airflow_cdc_provider.engine.failpoint import failpoint
from airflow_cdc_provider.engine.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.origin import Origin
from airflow_cdc_provider.engine.sinks.base import Record, StagedPiece, Target
from airflow_cdc_provider.engine.sinks.lake import changes
from airflow_cdc_provider.engine.sinks.lake.changes import Change, Contents, Step
from airflow_cdc_provider.engine.sinks.lake.log import Head, Log
from airflow_cdc_provider.engine.sinks.lake.place import Place

FOLDER = "_airflow_cdc"
"""Of the sink's path. Readers of tables pass over names that begin with an underscore."""

_STORE = "store.id"  # no pipeline's name has a dot

_PATIENCE = 30.0  # seconds. A step of large tables may take longer; who does it, too, then wastes work, and no more
_LOOK_SECONDS = 0.2

_locks: defaultdict[Place, threading.RLock] = defaultdict(threading.RLock)
_decided: dict[Place, int] = {}
"""The last step that this process has decided."""


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


@dataclass(frozen=True)
class LakeRecord:
    """A pipeline's commit record below a path.

    :param root: where the tables are.
    :param pipeline: name of the pipeline.
    :param mode: ``mirror`` or ``changelog``.
    """

    root: Place
    pipeline: str
    mode: Literal["mirror", "changelog"]

    # -- what a sink does beside the log ------------------------------------------------------------

    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: int | None) -> None:
        """Refuse a target that is not there for this pipeline; touch nothing.

        :param recorded: the target of the record for this table; ``None`` when it joins.
        :param ours: the target is known to be the pipeline's, although no record says so.
        :param start: where the slot begins; ``None`` for a table that joins a running pipeline.
        :raises ForeignTable: see :meth:`.base.Sink.prepare`.
        :raises GateClosed: likewise.
        """
        raise NotImplementedError

    def _known_as(self, schema: str, name: str) -> Hashable:
        """By what the store tells a target from others."""
        return schema, name

    def _require_apart(self, targets: Sequence[Target]) -> None:
        """Refuse targets of the pipeline that the store takes for one.

        :raises ConfigError: naming two.
        """

    def _create(self, targets: Sequence[Target]) -> None:
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

    def _missing(self, head: Head | None, targets: Sequence[Target]) -> tuple[Target, ...]:
        """The targets that no longer exist; see :meth:`.base.Sink.missing`."""
        return ()

    def _carry_out(self, contents: Contents, step: Step) -> None:
        """Do what a step says, if it has not been done: several processes may do so, at once and one after the other.

        One that was overtaken long ago may do so, too, when it wakes up. What the step changes must therefore note the
        step's number in the same commit, and refuse one that is not beyond what it has noted.
        """
        raise NotImplementedError

    # -- appending ----------------------------------------------------------------------------------

    @property
    def _home(self) -> Place:
        return self.root / FOLDER / self.pipeline

    @property
    def _log(self) -> Log:
        return Log(self._home / "log")

    def _contents(self, epoch: int) -> Contents:
        """What the log holds.

        :raises Fenced: when the epoch is another's.
        """
        return self._head(epoch).contents

    def _head(self, epoch: int | None) -> Head:
        head = self._log.head()
        if head is None or not head.contents.get("head"):
            raise Fenced(
                f"the sink {self.root.url} has no commit record of pipeline {self.pipeline} any more",
                "Nothing to do if the pipeline has been dropped; otherwise start it again, and it says what helps.",
            )
        current = head.contents["head"]["epoch"]
        if epoch is not None and current != epoch:
            raise Fenced.by(f"pipeline {self.pipeline} in {self.root.url} is at", current, epoch)
        return head

    def _append(self, epoch: int | None, what: str, decide: Callable[[Contents], Commit | None]) -> Contents | None:
        """Append an entry, then carry out what it decides.

        A step that is open is carried out before, unless another part of the run is at it; without an epoch, whose
        entry may then come between the step's two, afterwards, so that nobody else decides another one meanwhile.

        :param epoch: of the run; ``None`` for who takes it, or needs none.
        :param what: the entry's title, for people.
        :param decide: says from the contents what is to be committed, ``None`` for nothing. Called again when another
            has appended meanwhile, so it must do nothing but decide.
        :returns: the contents afterwards; ``None`` when nothing was to be committed.
        :raises Fenced: when the epoch is another's.
        """
        with _locks[self._home]:
            while True:
                head = self._head(epoch)
                if epoch is not None and (step := changes.step_of(head.contents)) is not None:
                    if not self._is_done_by_another(step):
                        self._roll_forward(head)
                    continue
                commit = decide(head.contents)
                if commit is None:
                    return None
                change = commit.now
                if commit.work is not None:
                    change += changes.decided(head.number + 1, commit.work, commit.then)
                appended = self._log.append(head, change, what)
                if appended is None:
                    continue
                if commit.work is not None:
                    _decided[self._home] = appended.number
                return self._completed(appended).contents

    def append_beside(self, what: str, decide: Callable[[Contents], Commit | None]) -> bool:
        """Append an entry that needs no epoch, as what it says holds whoever runs the pipeline.

        :param what, decide: as for a commit, which must do nothing when it does not hold any more.
        :returns: whether anything was to be committed.
        """
        return self._append(None, what, decide) is not None

    def head(self) -> Head | None:
        """The last entry of the log; ``None`` when there is no pipeline."""
        head = self._log.head()
        return head if head is not None and head.contents.get("head") else None

    def _is_done_by_another(self, step: Step) -> bool:
        """Leave a step for a while to the process that has decided it: two that do the same are slower than one."""
        deadline = time.monotonic() + (0.0 if _decided.get(self._home) == step.number else _PATIENCE)
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            head = self._log.head()
            if head is None or changes.step_of(head.contents) != step:
                return True
        return False

    def _completed(self, head: Head) -> Head:
        """Have the step that is open in ``head`` carried out, by this process or another."""
        number = head.number
        while (step := changes.step_of(head.contents)) is not None and step.number <= number:
            self._roll_forward(head)
            head = self._head(None)
        return head

    def _roll_forward(self, head: Head) -> None:
        """Carry out the step that is open in ``head``, and say so unless another has appended meanwhile."""
        step = changes.step_of(head.contents)
        assert step is not None
        failpoint("before-step")
        self._carry_out(head.contents, step)
        failpoint("after-step")
        self._log.append(head, changes.carried_out(step), f"carried out {step.number}")

    # -- the record ---------------------------------------------------------------------------------

    def record(self) -> Record | None:
        """See :meth:`.base.Sink.record`."""
        head = self._log.head()
        return None if head is None else changes.record_of(head.contents)

    def identity(self) -> Mapping[str, Any]:
        """See :meth:`.base.Sink.identity`: a number that the store is given when it is first asked."""
        name = f"{FOLDER}/{_STORE}"
        while (found := self.root.read(name)) is None:
            self.root.create(name, uuid.uuid4().hex.encode())
        return {"store": found.decode()}

    def prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: int,
        ours: Collection[str] = (),
        rehearsal: bool = False,
    ) -> None:
        """See :meth:`.base.Sink.prepare`."""
        self.root.require_create()
        self._check(targets, {}, start, ours)
        begun = SecondWriter(
            f"another run has provisioned pipeline {self.pipeline} meanwhile",
            "Nothing to do if the other run is meant; otherwise stop it and start again.",
        )
        if self._log.head() is not None:
            raise begun
        if rehearsal:
            return
        self._create(targets)
        failpoint("before-plan")
        plan = changes.provisioned(targets, chunks, identity, start, time.time())
        plan += self._described({}, targets, ours)
        if self._log.begin(plan, "provisioned") is None:
            raise begun
        failpoint("after-plan")

    def check_targets(self, targets: Sequence[Target]) -> None:
        """Refuse targets, recorded ones or others, that are not there for this pipeline; touch nothing.

        :raises CdcError: as :meth:`.base.Sink.prepare`.
        """
        head = self._log.head()
        self._check(targets, {} if head is None else changes.targets_of(head.contents))

    def add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        """See :meth:`.base.Sink.add`."""
        self._check(targets, changes.targets_of(self._contents(epoch)))
        self._create(targets)
        failpoint("before-plan")

        def decide(contents: Contents) -> Commit:
            return Commit(changes.added(targets, chunks) + self._described(contents, targets, ()))

        self._append(epoch, "tables added", decide)
        failpoint("after-plan")

    def restart(
        self,
        epoch: int,
        targets: Sequence[Target],
        identity: Mapping[str, Any],
        start: int,
        rehearsal: bool = False,
    ) -> None:
        """See :meth:`.base.Sink.restart`."""
        recorded = changes.targets_of(self._contents(epoch))
        self._check(targets, recorded, start)
        if rehearsal:
            return
        self._create([target for target in targets if target.table.label not in recorded])

        def decide(contents: Contents) -> Commit:
            begins = changes.restarted(targets, identity, start, time.time())
            begins += self._described(contents, targets, ())
            work = self._fit(contents, targets)
            return Commit(begins) if work is None else Commit(work=work, then=begins)

        self._append(epoch, "restarted", decide)

    def forget(self, epoch: int, labels: Sequence[str]) -> None:
        """See :meth:`.base.Sink.forget`."""
        if labels:
            self._append(epoch, "tables forgotten", lambda contents: Commit(changes.forgotten(contents, labels)))

    def note_source(self, epoch: int, values: Mapping[str, Any]) -> None:
        """See :meth:`.base.Sink.note_source`."""
        self._append(epoch, "source noted", lambda contents: Commit(changes.noted(values)))

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """See :meth:`.base.Sink.take_epoch`; what an earlier run has decided is then carried out, and in the record.

        :raises CdcError: when it cannot be. The epoch has been taken all the same.
        """
        failpoint("before-epoch")
        taken: list[int] = []

        def decide(contents: Contents) -> Commit:
            change = changes.taken(contents, owner, time.time(), at_least)
            taken.append(change.set["head"]["epoch"])
            return Commit(change)

        self._append(None, f"epoch taken by {owner}", decide)
        failpoint("after-epoch")
        return taken[-1]

    @contextmanager
    def fenced(self, epoch: int) -> Iterator[None]:
        """See :meth:`.base.Sink.fenced`. Nobody can be kept from taking it: it is looked at, before and afterwards.

        What is done beside the sink may therefore be done by a run that is overtaken right then; it is told afterwards.
        """
        self._contents(epoch)
        yield
        self._contents(epoch)

    def end_sessions(self) -> None:
        """See :meth:`.base.Sink.end_sessions`; there are none, and an overtaken run cannot commit.

        What has been decided will be in the record; it is carried out, so that whoever reads that next goes on from it.
        """
        if (head := self.head()) is not None:
            self._completed(head)

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """See :meth:`.base.Sink.missing`. As targets are what they are by all that has been decided, that is carried
        out first: a part that enters a run looks for them before it reads where the record ends."""
        head = self.head()
        step = None if head is None else changes.step_of(head.contents)
        if head is not None and step is not None and not self._is_done_by_another(step):
            self._completed(head)
        return self._missing(self._log.head(), targets)

    def drop(self) -> None:
        """See :meth:`.base.Sink.drop`."""
        with _locks[self._home]:
            while (head := self._log.head()) is not None and not self._log.drop(head):
                pass
            self._home.remove()

    # -- what every commit asks ---------------------------------------------------------------------

    def _is_open(self, contents: Contents, chunk: Chunk, origin: Origin) -> bool:
        """Whether a chunk is still to be committed.

        :raises StreamFailed: when it was read from another server than the one that the pipeline has gone on to.
        """
        noted = Origin.of(contents["source"])
        if noted != origin:
            raise StreamFailed(
                f"chunk {chunk.title} is read from {origin}, but the pipeline has gone on to {noted}",
                "Start again: the chunk is then read there.",
            )
        recorded = contents.get("chunks", {}).get(changes.chunk_key(chunk))
        return recorded is not None and "snapshot" not in recorded

    def _is_next(self, contents: Contents, start: int, end: int, pieces: Sequence[StagedPiece]) -> bool:
        """Whether the unit ``(start, end]`` is still to be committed.

        :raises GateClosed: when it does not begin where the record ends.
        :raises StagingLost: when rows were read again since it was staged: they hold changes that it would take back.
        """
        applied = parse_lsn(contents["head"]["applied"])
        if applied >= end:
            return False
        if start != applied:
            raise GateClosed(
                f"the unit ({format_lsn(start)}, {format_lsn(end)}] of pipeline {self.pipeline} does not begin"
                f" at the applied LSN {format_lsn(applied)}: transactions would be lost or repeated",
                "Start the pipeline again; it goes on from the applied LSN. If the sink was restored from a"
                " backup, run `airflow-cdc resnapshot --all`.",
            )
        high = min((piece.high for piece in pieces), default=None)
        if high is not None and changes.highest(contents) > high:
            labels = [label for label in contents.get("tables", {}) if changes.highest(contents, label) > high]
            raise StagingLost(
                f"rows of {', '.join(labels)} were read again after the unit had been staged",
                "Start again: the unit is staged anew, without what has been read.",
            )
        return True

    def _check(
        self,
        targets: Sequence[Target],
        recorded: Mapping[str, Target],
        start: int | None = None,
        ours: Collection[str] = (),
    ) -> None:
        """Refuse targets that are not there for this pipeline; touch nothing.

        :param recorded: by label; tables stay beside those of ``targets``, unless all begin.
        :param start: where the slot begins; ``None`` for tables that join a running pipeline.
        :param ours: labels of targets that are known to be the pipeline's, although no record says so.
        """
        staying = recorded if start is None else {}
        self._require_apart(list({**staying, **{target.table.label: target for target in targets}}.values()))
        for target in targets:
            self._refuse_anothers(target)
            self._check_target(target, recorded.get(target.table.label), target.table.label in ours, start)

    def _refuse_anothers(self, target: Target) -> None:
        """Refuse a target, with rows or without, into which another pipeline copies."""
        for pipeline in (self.root / FOLDER).names():
            if pipeline in (self.pipeline, _STORE):
                continue
            head = Log(self.root / FOLDER / pipeline / "log").head()
            tables = head.contents.get("tables", {}).values() if head is not None else ()
            own = self._known_as(target.schema, target.name)
            if any(self._known_as(table["schema"], table["name"]) == own for table in tables):
                raise ForeignTable(
                    f"the target table {target.schema}.{target.name} belongs to pipeline {pipeline!r}",
                    "Give this pipeline another target schema (`sink.schema`); or, if the other one is not needed any"
                    " more, run `airflow-cdc drop` with its file, then try again.",
                )

    # -- staged files and deposits ------------------------------------------------------------------

    def _staging(self, kind: Literal["units", "chunks"], epoch: int) -> Place:
        """Where files stand until they are committed. :meth:`sweep` empties it: of chunks, whose tasks it goes on
        beside, only what earlier runs have left."""
        return self._home / "staging" / kind / str(epoch)

    def sweep(self, epoch: int) -> None:
        """See :meth:`.base.Sink.sweep`; nothing, either, while a step is open, which still needs what is staged."""
        head = self._log.head()
        if head is None or changes.step_of(head.contents) is not None:
            return
        for kind in ("units", "chunks"):
            self._remove_epochs(f"staging/{kind}", epoch, own=kind == "units")

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """See :meth:`.base.Sink.deposit`."""
        self._contents(epoch)
        self._home.replace(f"deposits/{epoch}/{name}", bytes(data))

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """See :meth:`.base.Sink.fetch`."""
        self._contents(epoch)
        found = self._home.read(f"deposits/{epoch}/{name}")
        if found is None or len(found) != size:
            raise StagingLost(
                f"{size} bytes of the log were left in the sink, {len(found or b'')} are there",
                "Start again: the log is read anew from the applied LSN.",
            )
        return bytearray(found)

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """See :meth:`.base.Sink.discard`."""
        if names is None:
            self._remove_epochs("deposits", epoch, own=True)
        for name in names or ():
            self._home.remove(f"deposits/{epoch}/{name}")

    def _remove_epochs(self, folder: str, epoch: int, own: bool) -> None:
        """Remove what runs up to the present one have left; nothing when the epoch is another's by now."""
        head = self._log.head()
        if head is None or head.contents.get("head", {}).get("epoch") != epoch:
            return
        for name in self._home.names(folder):
            if name.isdigit() and (int(name) < epoch or (own and int(name) == epoch)):
                self._home.remove(f"{folder}/{name}")
