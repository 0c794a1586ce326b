"""The history of a run: the source's transactions in commit order, the pipeline's reads, and observations.

It is plain data, so that the checks can run over a manipulated history.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from airflow_cdc_provider.engine.core.chunk import Chunk
from tests.torture.schema import SPACE, Table


@dataclass(frozen=True)
class Change:
    """A row change, or a truncate, as a trigger recorded it."""

    table: str
    op: str
    old_key: str | None
    new_key: str | None
    old_n: int | None
    new_n: int | None
    version: int | None
    digest: int | None


@dataclass(frozen=True)
class Transaction:
    """A committed transaction.

    :param commit: LSN of its commit record, which changelogs contain.
    :param end: LSN after it, in which positions are measured.
    """

    xid: int
    commit: int
    end: int
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Reading:
    """A chunk or re-read that the sink has committed.

    :param applied: the sink's applied LSN at that moment.
    :param left: where its timeline's log was left; ``None`` if it has not been left.
    :param numbers: row numbers whose keys it covers; ``None`` for all.
    :param keys: texts of the keys that it covers, for a re-read by key.
    """

    table: str
    applied: int
    rows: int
    snapshot: str
    left: int | None = None
    numbers: frozenset[int] | None = None
    keys: frozenset[str] | None = None

    def covers(self, key: str | None, n: int | None) -> bool:
        if self.keys is not None:
            return key in self.keys
        return self.numbers is None or n in self.numbers

    def sees(self, transaction: Transaction) -> bool:
        """Return whether the read's MVCC snapshot sees a transaction; another timeline assigns the same ids again."""
        if self.left is not None and transaction.end > self.left:
            return False
        xid = transaction.xid
        xmin, xmax, running = self.snapshot.split(":")
        if xid >= int(xmax):
            return False
        return xid < int(xmin) or str(xid) not in running.split(",")


@dataclass(frozen=True)
class Gap:
    """Transactions that end after ``start`` and up to ``end``, never streamed because the slot was recreated."""

    start: int
    end: int


@dataclass(frozen=True)
class Sight:
    """The contents of the target that a reader saw in one snapshot.

    :param applied: applied LSN in that snapshot.
    :param consistent: whether the record there called the mirror a state of the source.
    :param tables: for each table of a mirror the number of its rows and the sum of their digests; for a changelog the
        number of changes.
    :param total: sum over all accounts; ``None`` for a changelog.
    """

    applied: int
    consistent: bool
    tables: Mapping[str, tuple[int, int]]
    total: int | None


@dataclass(frozen=True)
class Entry:
    """A change in a changelog table.

    :param version: version of the row, which stands for the values of this change; ``None`` if there is no new row.
    """

    table: str
    xid: int
    commit: int
    seq: int
    op: str
    key: str | None
    version: int | None = None


@dataclass
class History:
    """The whole history."""

    transactions: list[Transaction] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    sights: list[Sight] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    snapshot_rows: dict[str, int] = field(default_factory=dict)


class Truth:
    """The order of commits, from a separate slot on the audit trail."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._commits: dict[int, tuple[int, int]] = {}

    def advance(self) -> None:
        """Record all commits so far."""
        query = (
            "SELECT data FROM pg_logical_slot_get_binary_changes('torture_truth', NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'torture_truth')"
        )
        xid = 0
        with psycopg.connect(self._dsn, autocommit=True, connect_timeout=10) as connection:
            for (data,) in connection.execute(query):
                if data[:1] == b"B":
                    (xid,) = struct.unpack_from(">I", data, 17)
                elif data[:1] == b"C":
                    commit, end = struct.unpack_from(">qq", data, 2)
                    self._commits[commit] = (xid, end)

    def transactions(self) -> list[Transaction]:
        """Return all transactions in commit order, with their changes."""
        self.advance()
        changes: dict[int, list[Change]] = {}
        full: dict[int, int] = {}
        query = (
            "SELECT xid::text::bigint, source_table, op, old_key, new_key, old_n, new_n, version, digest"
            " FROM torture.audit ORDER BY seq"
        )
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            for xid, *values in connection.execute(query):
                changes.setdefault(xid, []).append(Change(*values))
                full[xid & 0xFFFFFFFF] = xid
        ordered = sorted(self._commits.items())
        assert {full.get(xid) for _, (xid, _) in ordered} == set(changes), "the audit trail and its slot disagree"
        return [Transaction(full[xid], commit, end, tuple(changes[full[xid]])) for commit, (xid, end) in ordered]


# The pipeline removes its entries about reads; this keeps them all, whatever the pipeline's role may do.
TARGET_SETUP = (
    "CREATE SCHEMA torture",
    """
CREATE TABLE torture.readings (
    n bigserial PRIMARY KEY, source_table text, definition jsonb, keys jsonb, snapshot text, rows bigint,
    applied pg_lsn, timeline int
)""",
    "CREATE TABLE torture.gaps (n bigserial PRIMARY KEY, start_lsn pg_lsn, end_lsn pg_lsn)",
    """
CREATE FUNCTION torture.reading() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO torture.readings (source_table, definition, keys, snapshot, rows, applied, timeline)
    SELECT NEW.source_table, NEW.definition, NEW.keys, NEW.snapshot, NEW.row_count, applied_lsn,
        (source ->> 'timeline')::int
    FROM airflow_cdc.pipelines WHERE pipeline = NEW.pipeline;
    RETURN NULL;
END $$""",
    """
CREATE FUNCTION torture.gap() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO torture.gaps (start_lsn, end_lsn)
    SELECT OLD.applied_lsn, NEW.applied_lsn WHERE EXISTS (
        SELECT FROM airflow_cdc.chunks WHERE pipeline = NEW.pipeline AND xmin = pg_current_xact_id()::xid
    );
    RETURN NULL;
END $$""",
    # Units also change the applied LSN; starting over plans chunks in the same transaction.
    """
CREATE FUNCTION torture.watch() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands() WHERE object_identity = 'airflow_cdc.chunks') THEN
        CREATE TRIGGER torture AFTER INSERT OR UPDATE ON airflow_cdc.chunks FOR EACH ROW
            WHEN (NEW.snapshot IS NOT NULL) EXECUTE FUNCTION torture.reading();
    END IF;
    IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands() WHERE object_identity = 'airflow_cdc.pipelines') THEN
        CREATE TRIGGER torture AFTER UPDATE ON airflow_cdc.pipelines FOR EACH ROW
            WHEN (OLD.applied_lsn <> NEW.applied_lsn) EXECUTE FUNCTION torture.gap();
    END IF;
END $$""",
    "CREATE EVENT TRIGGER torture ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION torture.watch()",
)


def readings(source: str, target: str, tables: list[Table], left: Mapping[int, int]) -> list[Reading]:
    """Return the pipeline's reads with the rows that each covers; only the source can compare keys.

    :param left: where the log of each earlier timeline was left.
    """
    by_label = {table.label: table for table in tables}
    query = (
        "SELECT source_table, definition, keys, snapshot, rows, (applied - '0/0')::bigint, timeline"
        " FROM torture.readings ORDER BY n"
    )
    found = []
    with (
        psycopg.connect(source, autocommit=True) as at_source,
        psycopg.connect(target, autocommit=True) as at_target,
    ):
        for label, definition, keys, snapshot, rows, applied, timeline in at_target.execute(query):
            numbers = None
            chunk = Chunk.from_dict(definition if isinstance(definition, dict) else json.loads(definition))
            if keys is None and (chunk.lower is not None or chunk.upper is not None):
                numbers = _numbers(at_source, by_label[label], chunk)
            texts = None if keys is None else frozenset("/".join(key) for key in keys)
            found.append(Reading(label, applied, rows, snapshot, left.get(timeline), numbers, texts))
    return found


def gaps(target: str) -> list[Gap]:
    """Return the gaps from each time that the pipeline was started over; two without a change in between are one.

    After a failover, a second gap may end before the first one, on the timeline that was left.
    """
    query = "SELECT (start_lsn - '0/0')::bigint, (end_lsn - '0/0')::bigint FROM torture.gaps ORDER BY n"
    found: list[Gap] = []
    with psycopg.connect(target, autocommit=True) as connection:
        for start, end in connection.execute(query):
            begins = found.pop().start if found and found[-1].end == start else start
            found.append(Gap(begins, end))
    return found


def _numbers(source: psycopg.Connection[Any], table: Table, chunk: Chunk) -> frozenset[int]:
    """Return the row numbers whose keys are in a chunk."""
    key, kinds = table.key, [kind for _, kind in table.key.columns]
    conditions = []
    for operator, bound in ((">=", chunk.lower), ("<", chunk.upper)):
        if bound is not None:
            values = ", ".join(f"{sql.quote(text)}::{kind}" for text, kind in zip(bound, kinds, strict=True))
            conditions.append(f"({', '.join(key.names)}) {operator} ({values})")
    columns = ", ".join(
        f"({value.format(n='n')})::{kind} AS {name}"
        for value, kind, name in zip(key.values, kinds, key.names, strict=True)
    )
    numbers = f"SELECT n, {columns} FROM generate_series(0, {3 * SPACE}) n"
    query = f"SELECT n FROM ({numbers}) k WHERE {' AND '.join(conditions)}"
    return frozenset(n for (n,) in source.execute(query.encode()))
