"""The commit record of the MySQL sink: tables in the database ``airflow_cdc`` of the target server.

It is the authoritative state of a pipeline, and changes in the same transaction as the data.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import ChunkRecord, Record, Target, Watermark
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.mysql import session as sessions
from airflow_cdc_provider.engine.sinks.mysql.address import Address
from airflow_cdc_provider.engine.sinks.mysql.pending_ddl import begin_again, is_pending
from airflow_cdc_provider.engine.sinks.mysql.session import Session, session
from airflow_cdc_provider.engine.sinks.mysql.target_tables import MysqlTargets
from airflow_cdc_provider.engine.sinks.protocol_errors import provisioned_meanwhile

# Each is created by a statement that commits immediately. "pipelines" comes last: if it exists, the others do too.
_RECORD_TABLES = {
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
    "pipelines": "pipeline VARCHAR(64) NOT NULL PRIMARY KEY, epoch BIGINT NOT NULL, owner TEXT NOT NULL,"
    " applied_lsn BIGINT UNSIGNED NOT NULL, source LONGTEXT NOT NULL,"
    " updated_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
}
_RECORD_NAMES = ("pipelines", "tables", "chunks", "pending")
_SESSIONS = (
    "id BIGINT UNSIGNED NOT NULL PRIMARY KEY, server VARCHAR(255) NOT NULL, pipeline VARCHAR(64) NOT NULL,"
    " part VARCHAR(255) NOT NULL"
)


def create_record_tables(session: Session) -> None:
    """Create the tables of the commit record unless they exist."""
    session.require_database("airflow_cdc")
    options = f"CHARACTER SET utf8mb4 COLLATE {session.collation}"
    for name, body in _RECORD_TABLES.items():
        if not session.exists("airflow_cdc", name):
            session.run(f"CREATE TABLE IF NOT EXISTS airflow_cdc.{name} ({body}) ENGINE=InnoDB {options}")
    if not session.exists("airflow_cdc", "sessions"):
        session.run(f"CREATE TABLE IF NOT EXISTS airflow_cdc.sessions ({_SESSIONS}) ENGINE=MEMORY {options}")


def _lacking(opened: Session) -> list[str]:
    return [name for name in _RECORD_NAMES if not opened.exists("airflow_cdc", name)]


def _left_behind(opened: Session, names: Collection[str]) -> bool:
    """Return whether any of these tables has rows of any pipeline; then all tables existed earlier."""
    return any(opened.rows(f"SELECT 1 FROM airflow_cdc.{name} LIMIT 1") for name in names)


@dataclass(frozen=True)
class MysqlRecord(MysqlTargets):
    """A pipeline's commit record on a MySQL server."""

    # -- the record --------------------------------------------------------------------------------

    def identity(self) -> Mapping[str, Any]:
        """Return what distinguishes this server from every other."""
        with session(Address.parse(self.dsn)) as opened:
            return dict(
                opened.rows(
                    "SHOW GLOBAL VARIABLES WHERE variable_name IN ('server_uuid', 'server_uid', 'hostname', 'datadir')"
                )
            )

    def record(self) -> Record | None:
        """Return the commit record; ``None`` if there is none."""
        with self._session() as opened:
            lacking = _lacking(opened)
            if "pipelines" in lacking and not _left_behind(opened, set(_RECORD_NAMES).difference(lacking)):
                return None  # or another run is creating them right now
            if lacking and (lacking := _lacking(opened)):  # the other run may have finished by now
                raise GateClosed(
                    f"the commit record in {self._place} is incomplete: it lacks {', '.join(lacking)}",
                    "Restore the database airflow_cdc from a backup of the sink. Without a backup, drop it, and"
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
            applied=LogPosition(int(applied)),
            advanced=float(advanced),
            identity=json.loads(identity),
            targets=tuple(targets.values()),
            chunks=tuple(_chunk_record(*chunk) for chunk in chunks),
        )

    def _targets(self, tx: Session, labels: Collection[str] | None = None) -> dict[str, Target]:
        named = "" if labels is None else f" AND source_table IN ({', '.join(['%s'] * len(labels))})"
        found = tx.rows(
            "SELECT definition, target_schema, target_table FROM airflow_cdc.tables WHERE pipeline = %s"
            f"{named} ORDER BY source_table",
            [self.pipeline, *(labels or ())],
        )
        targets = (Target(Table.from_dict(json.loads(d)), schema, name) for d, schema, name in found)
        return {target.table.label: target for target in targets}

    def _shape(self, opened: Session, target: Target) -> Table:
        """Return the current definition of a target's table, which may be older than the recorded one."""
        found = opened.rows(
            "SELECT shape FROM airflow_cdc.tables WHERE pipeline = %s AND source_table = %s",
            [self.pipeline, target.table.label],
        )
        return Table.from_dict(json.loads(found[0][0])) if found else target.table

    def _source(self, tx: Session) -> Mapping[str, Any]:
        (noted,) = tx.one("SELECT source FROM airflow_cdc.pipelines WHERE pipeline = %s", [self.pipeline])
        found: Mapping[str, Any] = json.loads(noted)
        return found

    def _note(self, opened: Session, values: Mapping[str, Any]) -> None:
        opened.run(
            "UPDATE airflow_cdc.pipelines SET source = %s WHERE pipeline = %s",
            [json.dumps({**self._source(opened), **values}), self.pipeline],
        )

    def _forget(self, tx: Session, labels: Sequence[str]) -> None:
        for table in ("chunks", "tables"):
            for label in labels:
                query = f"DELETE FROM airflow_cdc.{table} WHERE pipeline = %s AND source_table = %s"
                tx.run(query, [self.pipeline, label])

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return the targets whose table no longer exists."""
        with self._session() as opened:
            # A table that is recorded as read may still have to replace its target.
            if opened.exists("airflow_cdc", "pending") and is_pending(opened, self.pipeline):
                with self._naming_lock(opened):
                    pass
            return tuple(target for target in targets if not opened.exists(target.schema, target.name))

    # -- plans -------------------------------------------------------------------------------------

    def _prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: LogPosition,
        ours: Collection[str],
        rehearsal: bool,
    ) -> None:
        """Create the commit record and target tables, see :meth:`.TransactionalRecord._prepare`.

        Tables are created before the record's transaction. A crash in between leaves empty tables, which their comment
        identifies as the pipeline's for the next attempt; an error removes them.
        """
        with self._alone(seconds=sessions.COMMIT_SECONDS) as opened:
            known = opened.exists("airflow_cdc", "pipelines") and opened.rows(
                "SELECT 1 FROM airflow_cdc.pipelines WHERE pipeline = %s", [self.pipeline]
            )
            if known:
                raise provisioned_meanwhile(self.pipeline)
            for target in targets:
                if target.table.label in ours and opened.exists(target.schema, target.name):
                    self._adopt(opened, target, start)
            new = [target for target in targets if target.table.label not in ours]
            new += [t for t in targets if t.table.label in ours and not opened.exists(t.schema, t.name)]
            lacking = [target for target in new if self._lacks(opened, target)]
            if rehearsal:
                return
            create_record_tables(opened)
            opened.register(self.pipeline, self.part)  # now that the table of sessions exists
            with self._created(opened, lacking):
                opened.begin()
                # Leftovers of a lost record belong to another slot: their chunks count as finished, with an old
                # snapshot.
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
                store = self._view_store(opened, start)
                store.check()
                store.rebuild([target.table.label for target in targets])  # views of a lost record
                failpoint("before-plan")
                opened.commit()

    def _add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        with self._alone(epoch, sessions.COMMIT_SECONDS) as opened:
            lacking = [target for target in targets if self._lacks(opened, target)]
            with self._created(opened, lacking):
                self._begin(opened, epoch, "alone")
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
        start: LogPosition,
        rehearsal: bool = False,
    ) -> None:
        """Begin again at another start of the slot, see :meth:`.contract.Sink.restart`.

        Target tables keep their definition until the rows that replace theirs are there.
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
            applied = self._begin(opened, epoch, "alone")
            for target in targets:
                if target.table.label in recorded:
                    self._redefine_views(opened, applied, recorded[target.table.label], target)
            self._forget(opened, list(recorded))
            self._view_store(opened, applied).rebuild(recorded)
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
            # Not earlier: an empty table must not take the place of one whose rows the record still reports as read.
            with self._created(opened, lacking):
                pass

    def _plan(self, opened: Session, chunk: Chunk) -> None:
        opened.run(
            "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition) VALUES (%s, %s, %s, %s)",
            [self.pipeline, chunk.table, chunk.index, json.dumps(chunk.to_dict())],
        )

    def _enter(self, opened: Session, target: Target, shape: Table | None = None) -> None:
        """Add a target table to the record, unless it is there already."""
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


def _chunk_record(
    definition: str, snapshot: str | None, high: int | None, count: int | None, keys: str | None
) -> ChunkRecord:
    watermark = Watermark(Snapshot.parse(snapshot), LogPosition(int(high))) if snapshot and high else None
    return ChunkRecord(
        Chunk.from_dict(json.loads(definition)),
        watermark,
        count or 0,
        None if keys is None else frozenset(tuple(key) for key in json.loads(keys)),
    )
