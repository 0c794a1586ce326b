"""The commit record of sinks that store files without transactions: a log next to the tables.

It is the authoritative state of a pipeline, in ``<root>/_airflow_cdc/<pipeline>/log``, see :mod:`.log`. For sinks whose
commit is a single entry, such as one that names files, the unit and the record change in the same step. Other commits
change several objects, such as tables with their own logs. Then one entry decides the work, which commits the unit; the
work is done; and another entry reports this. A process that arrives in between, also after a crash, does the work
first. The record contains the unit only after that, so that the tables always contain everything in the record.

No process has to be awaited or ended, because an overtaken run cannot append.
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
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import ChangesRecord, Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, Step

FOLDER = "_airflow_cdc"
"""Folder below the sink's path. Readers of tables ignore names that begin with an underscore."""

_STORE = "store.id"  # no pipeline's name has a dot

_PATIENCE = 30.0  # seconds; a step on large tables may take longer, then a second process only does the same work again
_LOOK_SECONDS = 0.2

_locks: defaultdict[Storage, threading.RLock] = defaultdict(threading.RLock)
_decided: dict[Storage, int] = {}
"""The last step that this process has decided."""


@dataclass(frozen=True)
class LakeRecord(ChangesRecord):
    """A pipeline's commit record below a path.

    :param root: directory of the tables.
    :param pipeline: name of the pipeline.
    :param mode: ``mirror`` or ``changelog``.
    """

    root: Storage
    pipeline: str
    mode: Literal["mirror", "changelog"]

    def _missing(self, head: Head | None, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return the targets that no longer exist; see :meth:`.contract.Sink.missing`."""
        return ()

    @abstractmethod
    def _carry_out(self, contents: Contents, step: Step) -> None:
        """Do the work of a step unless it has been done; several processes may do so, at once or one after the other.

        A run that was overtaken long ago may do so too when it resumes. Each change must therefore record the step's
        number in the same commit, and refuse a number that is not greater than the recorded one.
        """

    # -- appending ----------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """Return the URL, for messages."""
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
    def _home(self) -> Storage:
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
        """Append an entry, see :meth:`.ChangesRecord._append`.

        An open step is completed first, unless another part of the run is doing so. Without an epoch, the entry may
        come between the two entries of a step; the step is then completed afterwards, so that no other step is decided
        meanwhile.
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

    def append_without_epoch(self, what: str, decide: Callable[[Contents], Commit | None]) -> bool:
        """Append an entry that needs no epoch, because it is valid for any run.

        :param what, decide: as for a commit, which must do nothing if the entry is no longer valid.
        :returns: whether there was anything to commit.
        """
        return self._append(None, what, decide) is not None

    def head(self) -> Head | None:
        """Return the last entry of the log; ``None`` if there is no pipeline."""
        head = self._log.head()
        return head if head is not None and head.contents.get("head") else None

    def _is_done_by_another(self, step: Step) -> bool:
        """Leave a step for a while to the process that has decided it, because doing it twice at once is slower."""
        deadline = time.monotonic() + (0.0 if _decided.get(self._home) == step.number else _PATIENCE)
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            head = self._log.head()
            if head is None or record_contents.step_of(head.contents) != step:
                return True
        return False

    def _completed(self, head: Head) -> Head:
        """Complete the step that is open in ``head``, in this process or another."""
        number = head.number
        while (step := record_contents.step_of(head.contents)) is not None and step.number <= number:
            self._roll_forward(head)
            head = self._head(None)
        return head

    def _roll_forward(self, head: Head) -> None:
        """Do the work of the step that is open in ``head``, and append its completion unless another process has
        appended.
        """
        step = record_contents.step_of(head.contents)
        assert step is not None
        failpoint("before-step")
        self._carry_out(head.contents, step)
        failpoint("after-step")
        self._log.append(head, record_contents.carried_out(step), f"carried out {step.number}")

    # -- the record ---------------------------------------------------------------------------------

    def identity(self) -> Mapping[str, Any]:
        """Return the store's id, which is created when it is first needed."""
        name = f"{FOLDER}/{_STORE}"
        while (found := self.root.read(name)) is None:
            self.root.create(name, uuid.uuid4().hex.encode())
        return {"store": found.decode()}

    def end_sessions(self) -> None:
        """Complete an open step; there are no sessions, and an overtaken run cannot commit.

        The record will contain the decided step, so it is completed for the next reader of the record.
        """
        if (head := self.head()) is not None:
            self._completed(head)

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return the targets that no longer exist.

        An open step is completed first, because targets may depend on it. A part that enters a run checks its targets
        before it reads the end of the record.
        """
        head = self.head()
        step = None if head is None else record_contents.step_of(head.contents)
        if head is not None and step is not None and not self._is_done_by_another(step):
            self._completed(head)
        return self._missing(self._log.head(), targets)

    def drop(self) -> None:
        """Remove the log, everything staged and all deposits."""
        with _locks[self._home]:
            while (head := self._log.head()) is not None and not self._log.drop(head):
                pass
            self._home.remove()

    # -- staged files and deposits ------------------------------------------------------------------

    def _staging(self, kind: Literal["units", "chunks"], epoch: int) -> Storage:
        """Return the directory of uncommitted files. :meth:`sweep` empties it, except for chunks of the current run,
        whose tasks may still be running.
        """
        return self._home / "staging" / kind / str(epoch)

    def sweep(self, epoch: int) -> None:
        """Remove staged files; nothing while a step is open, because it still needs them."""
        head = self._log.head()
        if head is None or record_contents.step_of(head.contents) is not None:
            return
        for kind in ("units", "chunks"):
            self._remove_epochs(f"staging/{kind}", epoch, own=kind == "units")

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """Keep a piece of the log in a file."""
        self._contents(epoch)
        self._home.replace(f"deposits/{epoch}/{name}", bytes(data))

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """Return a deposit."""
        self._contents(epoch)
        found = self._home.read(f"deposits/{epoch}/{name}")
        if found is None or len(found) != size:
            raise StagingLost(
                f"{size} bytes of the log were deposited in the sink, but {len(found or b'')} were found",
                "Start again: the log is read again from the applied LSN.",
            )
        return bytearray(found)

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """Remove deposits."""
        if names is None:
            self._remove_epochs("deposits", epoch, own=True)
        for name in names or ():
            self._home.remove(f"deposits/{epoch}/{name}")

    def _remove_epochs(self, folder: str, epoch: int, own: bool) -> None:
        """Remove leftovers of runs up to the current one; nothing if another run has the epoch by now."""
        head = self._log.head()
        if head is None or head.contents.get("head", {}).get("epoch") != epoch:
            return
        for name in self._home.names(folder):
            if name.isdigit() and (int(name) < epoch or (own and int(name) == epoch)):
                self._home.remove(f"{folder}/{name}")
