"""The commit record of the MySQL sink: tables in the database ``airflow_cdc`` of the target server.

It is the ground truth of a pipeline. Every commit locks the epoch's row, so that taking the epoch waits for commits in
flight, and an overtaken writer is refused. DDL has a protocol of its own, see :mod:`.pending`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.chunks import Chunk
from airflow_cdc_provider.engine.errors import Blocked, CdcError, Fenced, ForeignTable, GateClosed, SecondWriter
from airflow_cdc_provider.engine.failpoint import failpoint
from airflow_cdc_provider.engine.lsn import format_lsn
from airflow_cdc_provider.engine.sinks.base import ChunkRecord, Record, Target, Watermark
from airflow_cdc_provider.engine.sinks.mysql import session as sessions
from airflow_cdc_provider.engine.sinks.mysql.definition import (
    alteration,
    columns_of,
    comment,
    create_table,
    differing,
    told_type,
)
from airflow_cdc_provider.engine.sinks.mysql.pending import begin_again, is_pending, settle
from airflow_cdc_provider.engine.sinks.mysql.session import Address, Session, quoted, session
from airflow_cdc_provider.engine.visibility import Snapshot

_RECORD_TABLES = {
    "pipelines": "pipeline VARCHAR(64) NOT NULL PRIMARY KEY, epoch BIGINT NOT NULL, owner TEXT NOT NULL,"
    " applied_lsn BIGINT UNSIGNED NOT NULL, source LONGTEXT NOT NULL,"
    " updated_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
    "tables": "pipeline VARCHAR(64) NOT NULL, source_table VARCHAR(160) NOT NULL, target_schema VARCHAR(64) NOT NULL,"
    " target_table VARCHAR(64) NOT NULL, definition LONGTEXT NOT NULL, shape LONGTEXT NOT NULL,"
    " PRIMARY KEY (pipeline, source_table)",
    "chunks": "pipeline VARCHAR(64) NOT NULL, source_table VARCHAR(160) NOT NULL, chunk INT NOT NULL,"
    " definition LONGTEXT NOT NULL, keys_read LONGTEXT, snapshot LONGTEXT, high_lsn BIGINT UNSIGNED, row_count BIGINT,"
    " epoch BIGINT, finished_at DATETIME(6), PRIMARY KEY (pipeline, source_table, chunk)",
    "pending": "pipeline VARCHAR(64) NOT NULL, source_table VARCHAR(160) NOT NULL, kind VARCHAR(16) NOT NULL,"
    " token VARCHAR(64) NOT NULL, target_schema VARCHAR(64) NOT NULL, target_table VARCHAR(64) NOT NULL,"
    " definition LONGTEXT NOT NULL, reread BOOLEAN NOT NULL, PRIMARY KEY (pipeline, source_table)",
    "deposits": "pipeline VARCHAR(64) NOT NULL, name VARCHAR(160) NOT NULL, number INT NOT NULL,"
    " fragment LONGBLOB NOT NULL, PRIMARY KEY (pipeline, name, number)",
}
_RECORD_NAMES = ("pipelines", "tables", "chunks", "pending")
_SESSIONS = (
    "id BIGINT UNSIGNED NOT NULL PRIMARY KEY, server VARCHAR(255) NOT NULL, pipeline VARCHAR(64) NOT NULL,"
    " part VARCHAR(255) NOT NULL"
)

T = TypeVar("T")


def create_record_tables(session: Session) -> None:
    """Create the tables of the commit record, where they are not there yet."""
    if not session.rows("SELECT 1 FROM information_schema.schemata WHERE schema_name = 'airflow_cdc'"):
        session.run("CREATE DATABASE IF NOT EXISTS airflow_cdc")
    options = f"CHARACTER SET utf8mb4 COLLATE {session.collation}"
    for name, body in _RECORD_TABLES.items():
        if not session.exists("airflow_cdc", name):
            session.run(f"CREATE TABLE IF NOT EXISTS airflow_cdc.{name} ({body}) ENGINE=InnoDB {options}")
    if not session.exists("airflow_cdc", "sessions"):
        session.run(f"CREATE TABLE IF NOT EXISTS airflow_cdc.sessions ({_SESSIONS}) ENGINE=MEMORY {options}")


@dataclass(frozen=True)
class MysqlRecord:
    """A pipeline's commit record on a MySQL server.

    :param dsn: see :meth:`.session.Address.parse`.
    :param pipeline: name of the pipeline.
    :param mode: ``mirror`` or ``changelog``.
    :param part: the part of a run whose sessions these are; empty for what is not done by one.
    """

    dsn: str = field(repr=False)
    pipeline: str
    mode: Literal["mirror", "changelog"]
    part: str = ""

    # -- sessions and transactions -----------------------------------------------------------------

    @property
    def _place(self) -> str:
        return Address.parse(self.dsn).place

    @property
    def _mark(self) -> str:
        """Of a fixed length, so that no pipeline's names begin with another's."""
        return hashlib.sha256(self.pipeline.encode()).hexdigest()[:12]

    @contextmanager
    def _session(self) -> Iterator[Session]:
        """A session that :meth:`end_sessions` finds."""
        with session(Address.parse(self.dsn)) as opened:
            opened.register(self.pipeline, self.part)
            yield opened

    @contextmanager
    def _alone(self, epoch: int | None = None, seconds: float | None = None) -> Iterator[Session]:
        """A session that alone may do DDL; the epoch stays what it is meanwhile.

        :raises Fenced: when ``epoch`` is another's.
        """
        with self._session() as opened, self._naming_lock(opened, seconds):
            if epoch is not None:
                self._fence(opened, epoch, "")
            yield opened

    @contextmanager
    def _naming_lock(self, opened: Session, seconds: float | None = None) -> Iterator[None]:
        """Hold the lock by name, with nothing pending."""
        name = f"airflow_cdc_{self._mark}"
        opened.acquire(name, sessions.LOCK_SECONDS if seconds is None else seconds)
        try:
            if opened.exists("airflow_cdc", "pending"):
                settle(opened, self.pipeline)
            yield
        finally:
            with suppress(Exception):  # it goes with the session at the latest
                opened.release(name)

    @contextmanager
    def _transaction(self, epoch: int, lock: Literal["share", "update"]) -> Iterator[tuple[Session, int]]:
        """A transaction that holds the epoch's row, and the applied LSN; committed at the end of the block.

        :raises Fenced: when the epoch is another's.
        """
        with self._session() as opened:
            applied = self._begin(opened, epoch, lock)
            yield opened, applied
            opened.commit()

    def _begin(self, opened: Session, epoch: int, lock: Literal["share", "update"]) -> int:
        """Begin such a transaction in a session; whatever is pending is settled before."""
        clause = {"share": "LOCK IN SHARE MODE", "update": "FOR UPDATE"}[lock]
        while True:
            opened.begin()
            applied = self._fence(opened, epoch, clause)
            if not is_pending(opened, self.pipeline):
                return applied
            opened.rollback()
            with self._naming_lock(opened):
                pass

    def _fence(self, opened: Session, epoch: int, clause: str) -> int:
        found = (
            opened.rows(
                f"SELECT epoch, applied_lsn FROM airflow_cdc.pipelines WHERE pipeline = %s {clause}", [self.pipeline]
            )
            if opened.exists("airflow_cdc", "pipelines")
            else []
        )
        if not found:
            raise Fenced(
                f"the sink {self._place} has no commit record of pipeline {self.pipeline} any more",
                "Nothing to do if the pipeline has been dropped; otherwise start it again, and it says what helps.",
            )
        ((current, applied),) = found
        if current != epoch:
            raise Fenced.by(f"pipeline {self.pipeline} in {self._place} is at", current, epoch)
        return int(applied)

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """See :meth:`.base.Sink.take_epoch`."""
        failpoint("before-epoch")
        epoch = self._insistently(lambda: self._next_epoch(owner, at_least))
        failpoint("after-epoch")
        return epoch

    def _next_epoch(self, owner: str, at_least: int) -> int:
        with self._alone(seconds=sessions.COMMIT_SECONDS) as opened:
            opened.limit_waiting(sessions.COMMIT_SECONDS)
            opened.begin()
            # By the clock, so that no epoch comes twice, whatever becomes of the record in between.
            opened.run(
                "UPDATE airflow_cdc.pipelines SET owner = %s, epoch = GREATEST(epoch + 1,"
                " FLOOR(UNIX_TIMESTAMP(NOW(6)) * 1000), %s) WHERE pipeline = %s",
                [owner, at_least, self.pipeline],
            )
            (epoch,) = opened.one("SELECT epoch FROM airflow_cdc.pipelines WHERE pipeline = %s", [self.pipeline])
            opened.commit()
            return int(epoch)

    def _insistently(self, step: Callable[[], T]) -> T:
        """Take a step that may have to wait for what an earlier run has left; it is ended if it takes too long."""
        try:
            return step()
        except Blocked:
            self.end_sessions()
            return step()

    def end_sessions(self) -> None:
        """See :meth:`.base.Sink.end_sessions`."""
        with session(Address.parse(self.dsn)) as opened:
            opened.end_others(self.pipeline, self.part)

    @contextmanager
    def fenced(self, epoch: int) -> Iterator[None]:
        """See :meth:`.base.Sink.fenced`."""
        with self._transaction(epoch, "share"):
            yield

    # -- the record --------------------------------------------------------------------------------

    def identity(self) -> Mapping[str, Any]:
        """See :meth:`.base.Sink.identity`."""
        with session(Address.parse(self.dsn)) as opened:
            return dict(
                opened.rows(
                    "SHOW GLOBAL VARIABLES WHERE variable_name IN ('server_uuid', 'server_uid', 'hostname', 'datadir')"
                )
            )

    def record(self) -> Record | None:
        """See :meth:`.base.Sink.record`."""
        with self._session() as opened:
            lacking = [name for name in _RECORD_NAMES if not opened.exists("airflow_cdc", name)]
            if len(lacking) == len(_RECORD_NAMES):
                return None
            if lacking:
                raise GateClosed(
                    f"the commit record in {self._place} is not whole: it lacks {', '.join(lacking)}",
                    "Restore the database airflow_cdc from a backup of the sink. Without one, drop that database, and"
                    " follow the messages of `airflow-cdc provision`.",
                )
            opened.begin_snapshot()
            found = opened.rows(
                "SELECT epoch, applied_lsn, UNIX_TIMESTAMP(updated_at), source FROM airflow_cdc.pipelines"
                " WHERE pipeline = %s",
                [self.pipeline],
            )
            if not found:
                return None
            targets = self._targets(opened)
            chunks = opened.rows(
                "SELECT definition, snapshot, high_lsn, row_count, keys_read FROM airflow_cdc.chunks"
                " WHERE pipeline = %s ORDER BY source_table, chunk",
                [self.pipeline],
            )
        ((epoch, applied, advanced, identity),) = found
        return Record(
            epoch=int(epoch),
            applied=int(applied),
            advanced=float(advanced),
            identity=json.loads(identity),
            targets=tuple(targets.values()),
            chunks=tuple(_chunk_record(*chunk) for chunk in chunks),
        )

    def _targets(self, opened: Session) -> dict[str, Target]:
        found = opened.rows(
            "SELECT definition, target_schema, target_table FROM airflow_cdc.tables WHERE pipeline = %s"
            " ORDER BY source_table",
            [self.pipeline],
        )
        targets = (Target(Table.from_dict(json.loads(d)), schema, name) for d, schema, name in found)
        return {target.table.label: target for target in targets}

    def _shape(self, opened: Session, target: Target) -> Table:
        """The definition that a target table has by now, which may be behind the recorded one."""
        found = opened.rows(
            "SELECT shape FROM airflow_cdc.tables WHERE pipeline = %s AND source_table = %s",
            [self.pipeline, target.table.label],
        )
        return Table.from_dict(json.loads(found[0][0])) if found else target.table

    def note_source(self, epoch: int, values: Mapping[str, Any]) -> None:
        """See :meth:`.base.Sink.note_source`."""
        with self._transaction(epoch, "update") as (opened, _):
            (noted,) = opened.one("SELECT source FROM airflow_cdc.pipelines WHERE pipeline = %s", [self.pipeline])
            opened.run(
                "UPDATE airflow_cdc.pipelines SET source = %s WHERE pipeline = %s",
                [json.dumps(json.loads(noted) | dict(values)), self.pipeline],
            )

    def forget(self, epoch: int, labels: Sequence[str]) -> None:
        """See :meth:`.base.Sink.forget`."""
        with self._transaction(epoch, "update") as (opened, _):
            for label in labels:
                self._forget(opened, label)

    def _forget(self, opened: Session, label: str) -> None:
        for table in ("chunks", "tables"):
            opened.run(
                f"DELETE FROM airflow_cdc.{table} WHERE pipeline = %s AND source_table = %s", [self.pipeline, label]
            )

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """See :meth:`.base.Sink.missing`."""
        with self._session() as opened:
            return tuple(target for target in targets if not opened.exists(target.schema, target.name))

    # -- plans -------------------------------------------------------------------------------------

    def prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: int,
        ours: Collection[str] = (),
        rehearsal: bool = False,
    ) -> None:
        """See :meth:`.base.Sink.prepare`.

        Tables are created before the record's transaction. A crash in between leaves empty ones that say whose they
        are, and are taken for what they are next time; an error removes them.
        """
        self._insistently(lambda: self._prepare(targets, chunks, identity, start, ours, rehearsal))
        if not rehearsal:
            failpoint("after-plan")

    def _prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: int,
        ours: Collection[str],
        rehearsal: bool,
    ) -> None:
        with self._alone(seconds=sessions.COMMIT_SECONDS) as opened:
            known = opened.exists("airflow_cdc", "pipelines") and opened.rows(
                "SELECT 1 FROM airflow_cdc.pipelines WHERE pipeline = %s", [self.pipeline]
            )
            if known:
                raise SecondWriter(
                    f"another run has provisioned pipeline {self.pipeline} meanwhile",
                    "Nothing to do if the other run is meant; otherwise stop it and start again.",
                )
            for target in targets:
                if target.table.label in ours and opened.exists(target.schema, target.name):
                    self._adopt(opened, target, start)
            new = [target for target in targets if target.table.label not in ours]
            new += [t for t in targets if t.table.label in ours and not opened.exists(t.schema, t.name)]
            lacking = [target for target in new if self._lacks(opened, target)]
            if rehearsal:
                return
            create_record_tables(opened)
            opened.register(self.pipeline, self.part)  # now that there is a place for it
            with self._created(opened, lacking):
                opened.begin()
                # What a lost record has left is of another slot: its chunks count as finished, with a snapshot of then.
                for table in ("chunks", "tables", "pending"):
                    opened.run(f"DELETE FROM airflow_cdc.{table} WHERE pipeline = %s", [self.pipeline])
                opened.run(
                    "INSERT INTO airflow_cdc.pipelines (pipeline, epoch, owner, applied_lsn, source, updated_at)"
                    " VALUES (%s, 0, '', %s, %s, NOW(6))",
                    [self.pipeline, start, json.dumps(identity)],
                )
                for target in targets:
                    self._enter(opened, target)
                for chunk in chunks:
                    self._plan(opened, chunk)
                failpoint("before-plan")
                opened.commit()

    def add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        """See :meth:`.base.Sink.add`."""
        self._insistently(lambda: self._add(epoch, targets, chunks))
        failpoint("after-plan")

    def _add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        with self._alone(epoch, sessions.COMMIT_SECONDS) as opened:
            lacking = [target for target in targets if self._lacks(opened, target)]
            with self._created(opened, lacking):
                self._begin(opened, epoch, "update")
                for target in targets:
                    self._enter(opened, target)
                for chunk in chunks:
                    self._plan(opened, chunk)
                failpoint("before-plan")
                opened.commit()

    def restart(
        self,
        epoch: int,
        targets: Sequence[Target],
        identity: Mapping[str, Any],
        start: int,
        rehearsal: bool = False,
    ) -> None:
        """See :meth:`.base.Sink.restart`.

        Target tables keep the definition that they have, until the rows that replace theirs are there.
        """
        with self._alone(epoch) as opened:
            recorded = self._targets(opened)
            shapes = {label: self._shape(opened, target) for label, target in recorded.items()}
            lacking: list[Target] = []
            for target in targets:
                label, exists = target.table.label, opened.exists(target.schema, target.name)
                if self.mode == "changelog" and exists:
                    self._refuse_older_history(opened, target, start)
                if label not in recorded or not exists:
                    shapes[label] = target.table
                    if self._lacks(opened, target):
                        lacking.append(target)
                else:
                    self._alteration(opened, shapes[label], target, rows_stay=False)
            if rehearsal:
                return
            self._begin(opened, epoch, "update")
            for label in recorded:
                self._forget(opened, label)
            for target in targets:
                self._enter(opened, target, shapes[target.table.label])
                begin_again(opened, self.pipeline, target.table.label)
            opened.run(
                "UPDATE airflow_cdc.pipelines SET applied_lsn = %s, source = %s, updated_at = NOW(6)"
                " WHERE pipeline = %s",
                [start, json.dumps(identity), self.pipeline],
            )
            opened.commit()
            failpoint("after-restart")
            # Not before: an empty table must not stand for one whose rows the record still calls read.
            with self._created(opened, lacking):
                pass

    def _plan(self, opened: Session, chunk: Chunk) -> None:
        opened.run(
            "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition) VALUES (%s, %s, %s, %s)",
            [self.pipeline, chunk.table, chunk.index, json.dumps(chunk.to_dict())],
        )

    def _enter(self, opened: Session, target: Target, shape: Table | None = None) -> None:
        """Enter a target table into the record, as one of ours; one that is there stays."""
        opened.run(
            "INSERT IGNORE INTO airflow_cdc.tables (pipeline, source_table, target_schema, target_table, definition,"
            " shape) VALUES (%s, %s, %s, %s, %s, %s)",
            [
                self.pipeline,
                target.table.label,
                target.schema,
                target.name,
                json.dumps(target.table.to_dict()),
                json.dumps((shape or target.table).to_dict()),
            ],
        )

    # -- target tables -----------------------------------------------------------------------------

    @contextmanager
    def _created(self, opened: Session, targets: Sequence[Target]) -> Iterator[None]:
        """Create target tables; after an error they are gone again."""
        made: list[str] = []
        try:
            for target in targets:
                query = "SELECT 1 FROM information_schema.schemata WHERE schema_name = %s"
                if not opened.rows(query, [target.schema]):
                    opened.run(f"CREATE DATABASE IF NOT EXISTS {quoted(target.schema)}")
                name = quoted(target.schema, target.name)
                opened.run(f"DROP TABLE IF EXISTS {name}")  # one of ours, and empty: see _lacks
                opened.run(create_table(target, self.mode, opened.collation, self.pipeline))
                made.append(name)
            yield
        except (CdcError, sessions.driver().MySQLError):
            with suppress(sessions.driver().MySQLError):
                opened.rollback()
                for name in made:
                    opened.run(f"DROP TABLE IF EXISTS {name}")
            raise

    def _lacks(self, opened: Session, target: Target) -> bool:
        """Whether a target table has to be created. One that is there is ours, or empty and as it has to be.

        :raises ForeignTable: when it is neither, or another pipeline's.
        """
        wanted = create_table(target, self.mode, opened.collation, self.pipeline)
        label, shown = target.table.label, f"{target.schema}.{target.name}"
        if opened.exists("airflow_cdc", "tables"):
            owners = opened.rows(
                "SELECT DISTINCT pipeline, source_table FROM airflow_cdc.tables"
                " WHERE target_schema = %s AND target_table = %s",
                [target.schema, target.name],
            )
            others = [repr(owner) for owner, _ in owners if owner != self.pipeline]
            if others:
                raise ForeignTable(
                    f"the target table {shown} belongs to pipeline {', '.join(others)}",
                    "Give this pipeline another target database (`sink.schema`); or, if the other one is not needed any"
                    " more, run `airflow-cdc drop` with its file, then try again.",
                )
            if (self.pipeline, label) in owners:
                return not opened.exists(target.schema, target.name)
        if not opened.exists(target.schema, target.name):
            return True
        if opened.rows(f"SELECT 1 FROM {quoted(target.schema, target.name)} LIMIT 1"):
            raise ForeignTable(
                f"the target table {shown} exists and has rows that pipeline {self.pipeline!r} did not write",
                "Empty or drop the table, or give the pipeline another target database (`sink.schema`).",
            )
        if not self._differs(opened, target):
            return False
        (said,) = opened.one(
            "SELECT table_comment FROM information_schema.tables WHERE table_schema = %s AND table_name = %s",
            [target.schema, target.name],
        )
        if said == comment(self.pipeline):
            return True
        raise ForeignTable(
            f"the target table {shown} exists, but is not as it has to be ({self._differs(opened, target)})",
            f"Drop the table, so that it is created, or create it so: {' '.join(wanted.split())}",
        )

    def _adopt(self, opened: Session, target: Target, start: int) -> None:
        """Accept a target table as ours, whose definition nobody has recorded; its rows will be replaced."""
        if self.mode == "changelog":
            self._refuse_older_history(opened, target, start)
        different = self._differs(opened, target)
        if different:
            wanted = create_table(target, self.mode, opened.collation, self.pipeline)
            raise ForeignTable(
                f"the target table {target.schema}.{target.name} is not defined as {target.table.label} is now"
                f" ({different})",
                f"Drop or rename it, so that it is created, or make it so: {' '.join(wanted.split())}; then run"
                " `airflow-cdc resnapshot --all`.",
            )

    def _differs(self, opened: Session, target: Target) -> str:
        """In what a table is not as it has to be; empty if in nothing."""
        where = [target.schema, target.name]
        found = dict(
            opened.rows(
                "SELECT column_name, column_type FROM information_schema.columns"
                " WHERE table_schema = %s AND table_name = %s",
                where,
            )
        )
        types = {name: told_type(str(kind)) for name, kind in found.items()}
        different = differing(types, columns_of(target.table, self.mode, opened.collation))
        if different:
            return f"columns {', '.join(different)}"
        (engine,) = opened.one(
            "SELECT engine FROM information_schema.tables WHERE table_schema = %s AND table_name = %s", where
        )
        if str(engine).lower() != "innodb":
            return f"engine {engine}"
        key = opened.rows(
            "SELECT column_name FROM information_schema.statistics"
            " WHERE table_schema = %s AND table_name = %s AND index_name = 'PRIMARY'",
            where,
        )
        if self.mode == "mirror" and {str(name) for (name,) in key} != set(target.table.key):
            return "primary key"
        return ""

    def _refuse_older_history(self, opened: Session, target: Target, point: int) -> None:
        """Events are in the order of their LSNs: those of a log that ended later would come after all new ones."""
        (last,) = opened.one(f"SELECT MAX(_commit_lsn) FROM {quoted(target.schema, target.name)}")
        if last is not None and int(last) > point:
            raise GateClosed(
                f"the changelog {target.schema}.{target.name} has events up to {format_lsn(int(last))}, but the"
                f" source's log is at {format_lsn(point)}: they are of a history that the source has left, and new ones"
                " would come before",
                f"Rename or empty {target.schema}.{target.name}, then run `airflow-cdc resnapshot --all` again.",
            )

    def _alteration(self, opened: Session, shape: Table, target: Target, rows_stay: bool) -> list[str]:
        """See :func:`.definition.alteration`."""
        present = [
            str(name)
            for (name,) in opened.rows(
                "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s",
                [target.schema, target.name],
            )
        ]
        return alteration(shape, target, self.mode, opened.collation, present, rows_stay)


def _chunk_record(
    definition: str, snapshot: str | None, high: int | None, count: int | None, keys: str | None
) -> ChunkRecord:
    watermark = Watermark(Snapshot.parse(snapshot), int(high)) if snapshot and high else None
    return ChunkRecord(
        Chunk.from_dict(json.loads(definition)),
        watermark,
        count or 0,
        None if keys is None else frozenset(tuple(key) for key in json.loads(keys)),
    )
