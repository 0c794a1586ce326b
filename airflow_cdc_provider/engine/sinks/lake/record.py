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
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from airflow_cdc_provider.engine.core.errors import StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.lake.log import Head, Log
from airflow_cdc_provider.engine.sinks.lake.storage import Place
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import ChangesRecord, Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, Step

FOLDER = "_airflow_cdc"
"""Of the sink's path. Readers of tables pass over names that begin with an underscore."""

_STORE = "store.id"  # no pipeline's name has a dot

_PATIENCE = 30.0  # seconds. A step of large tables may take longer; who does it, too, then wastes work, and no more
_LOOK_SECONDS = 0.2

_locks: defaultdict[Place, threading.RLock] = defaultdict(threading.RLock)
_decided: dict[Place, int] = {}
"""The last step that this process has decided."""


@dataclass(frozen=True)
class LakeRecord(ChangesRecord):
    """A pipeline's commit record below a path.

    :param root: where the tables are.
    :param pipeline: name of the pipeline.
    :param mode: ``mirror`` or ``changelog``.
    """

    root: Place
    pipeline: str
    mode: Literal["mirror", "changelog"]

    def _missing(self, head: Head | None, targets: Sequence[Target]) -> tuple[Target, ...]:
        """The targets that no longer exist; see :meth:`.contract.Sink.missing`."""
        return ()

    @abstractmethod
    def _carry_out(self, contents: Contents, step: Step) -> None:
        """Do what a step says, if it has not been done: several processes may do so, at once and one after the other.

        One that was overtaken long ago may do so, too, when it wakes up. What the step changes must therefore note the
        step's number in the same commit, and refuse one that is not beyond what it has noted.
        """

    # -- appending ----------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """See :attr:`.ChangesRecord.place`."""
        return self.root.url

    def _require_store(self) -> None:
        self.root.require_create()

    def _current(self) -> Contents | None:
        head = self.head()
        return None if head is None else head.contents

    def _others(self) -> Iterable[tuple[str, Contents]]:
        for pipeline in (self.root / FOLDER).names():
            if pipeline not in (self.pipeline, _STORE):
                head = Log(self.root / FOLDER / pipeline / "log").head()
                if head is not None:
                    yield pipeline, head.contents

    def _begin(self, change: Change, what: str) -> bool:
        return self._log.begin(change, what) is not None

    @property
    def _home(self) -> Place:
        return self.root / FOLDER / self.pipeline

    @property
    def _log(self) -> Log:
        return Log(self._home / "log")

    def _head(self, epoch: int | None) -> Head:
        head = self.head()
        self._owned(None if head is None else head.contents, epoch)
        assert head is not None
        return head

    def _append(self, epoch: int | None, what: str, decide: Callable[[Contents], Commit | None]) -> Contents | None:
        """See :meth:`.ChangesRecord._append`.

        A step that is open is carried out before, unless another part of the run is at it; without an epoch, whose
        entry may then come between the step's two, afterwards, so that nobody else decides another one meanwhile.
        """
        with _locks[self._home]:
            while True:
                head = self._head(epoch)
                if epoch is not None and (step := record_contents.step_of(head.contents)) is not None:
                    if not self._is_done_by_another(step):
                        self._roll_forward(head)
                    continue
                commit = decide(head.contents)
                if commit is None:
                    return None
                change = commit.now
                if commit.work is not None:
                    change += record_contents.decided(head.number + 1, commit.work, commit.then)
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
            if head is None or record_contents.step_of(head.contents) != step:
                return True
        return False

    def _completed(self, head: Head) -> Head:
        """Have the step that is open in ``head`` carried out, by this process or another."""
        number = head.number
        while (step := record_contents.step_of(head.contents)) is not None and step.number <= number:
            self._roll_forward(head)
            head = self._head(None)
        return head

    def _roll_forward(self, head: Head) -> None:
        """Carry out the step that is open in ``head``, and say so unless another has appended meanwhile."""
        step = record_contents.step_of(head.contents)
        assert step is not None
        failpoint("before-step")
        self._carry_out(head.contents, step)
        failpoint("after-step")
        self._log.append(head, record_contents.carried_out(step), f"carried out {step.number}")

    # -- the record ---------------------------------------------------------------------------------

    def identity(self) -> Mapping[str, Any]:
        """See :meth:`.contract.Sink.identity`: a number that the store is given when it is first asked."""
        name = f"{FOLDER}/{_STORE}"
        while (found := self.root.read(name)) is None:
            self.root.create(name, uuid.uuid4().hex.encode())
        return {"store": found.decode()}

    def end_sessions(self) -> None:
        """See :meth:`.contract.Sink.end_sessions`; there are none, and an overtaken run cannot commit.

        What has been decided will be in the record; it is carried out, so that whoever reads that next goes on from it.
        """
        if (head := self.head()) is not None:
            self._completed(head)

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """See :meth:`.contract.Sink.missing`. As targets are what they are by all that has been decided, that is
        carried out first: a part that enters a run looks for them before it reads where the record ends."""
        head = self.head()
        step = None if head is None else record_contents.step_of(head.contents)
        if head is not None and step is not None and not self._is_done_by_another(step):
            self._completed(head)
        return self._missing(self._log.head(), targets)

    def drop(self) -> None:
        """See :meth:`.contract.Sink.drop`."""
        with _locks[self._home]:
            while (head := self._log.head()) is not None and not self._log.drop(head):
                pass
            self._home.remove()

    # -- staged files and deposits ------------------------------------------------------------------

    def _staging(self, kind: Literal["units", "chunks"], epoch: int) -> Place:
        """Where files stand until they are committed. :meth:`sweep` empties it: of chunks, whose tasks it goes on
        beside, only what earlier runs have left."""
        return self._home / "staging" / kind / str(epoch)

    def sweep(self, epoch: int) -> None:
        """See :meth:`.contract.Sink.sweep`; nothing, either, while a step is open, which still needs what is staged."""
        head = self._log.head()
        if head is None or record_contents.step_of(head.contents) is not None:
            return
        for kind in ("units", "chunks"):
            self._remove_epochs(f"staging/{kind}", epoch, own=kind == "units")

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """See :meth:`.contract.Sink.deposit`."""
        self._contents(epoch)
        self._home.replace(f"deposits/{epoch}/{name}", bytes(data))

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """See :meth:`.contract.Sink.fetch`."""
        self._contents(epoch)
        found = self._home.read(f"deposits/{epoch}/{name}")
        if found is None or len(found) != size:
            raise StagingLost(
                f"{size} bytes of the log were left in the sink, {len(found or b'')} are there",
                "Start again: the log is read anew from the applied LSN.",
            )
        return bytearray(found)

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """See :meth:`.contract.Sink.discard`."""
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
