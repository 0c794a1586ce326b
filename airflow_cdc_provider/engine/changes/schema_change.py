"""Decides whether the stream can follow a change of a captured table's definition. Pure functions.

Postgres describes a relation before its first change after DDL. So the log shows DDL in order, but only if a change
follows it. Columns have numbers that outlive renaming and are never reused, so two definitions show what happened in
between: if the catalog agrees with the log and no table was rewritten, nothing else is hidden between the two.

DDL that changes columns locks out all sessions that write to the table. So in the order of commits the formats of a
table's changes follow each other, and a snapshot that sees the DDL sees every change in an older format. Therefore,
reading the table again is right in all cases in which the change cannot be followed exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from airflow_cdc_provider.engine.changes.redefinition import (
    changes_texts,
    has_other_keys,
    may_have_missed_changes,
    redefinition,
)
from airflow_cdc_provider.engine.changes.snapshot_filter import seen_by
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.row_changes import Changes, Relation
from airflow_cdc_provider.engine.core.table import Table


@dataclass(frozen=True)
class Unchanged:
    """The definition is the recorded one."""


@dataclass(frozen=True)
class FollowChange:
    """The target can be changed in the same way, between the changes before and after; its rows stay.

    :param table: the new definition; without a change of columns it only has to be recorded.
    """

    table: Table


@dataclass(frozen=True)
class Reread:
    """The table has to be read again under its new definition; ``why`` for the log."""

    why: str


@dataclass(frozen=True)
class Refuse:
    """The pipeline has to stop before the first change in the new definition."""

    message: str
    solution: str


Verdict = Unchanged | FollowChange | Reread | Refuse


def decide(before: Table, after: Table | CdcError, relation: Relation | None = None) -> Verdict:
    """Decide what to do about a table whose definition may have changed.

    :param before: the recorded definition, under which everything up to the stream's position has been applied.
    :param after: the definition in the catalog, or why the table cannot be captured now.
    :param relation: the description of the table in the log from here on, if it is known. If not, all changes before
        the moment at which ``after`` was read are in the format of ``before``.
    """
    if isinstance(after, CdcError):
        return Refuse(after.message, after.solution)
    again = (
        f"Take the change back and start again; or run `airflow-cdc resnapshot --table '{before.label}'`, which reads"
        " the table again as it is now, and go on."
    )
    change = redefinition(before, after)
    if after.oid != before.oid:
        return Refuse(f"{before.label} has been dropped and recreated", again)
    if after.replica_identity != before.replica_identity:
        was, now = before.replica_identity, after.replica_identity
        return Refuse(f"the replica identity of {before.label} was {was!r}, is {now!r}", again)
    if change.key:
        was, now = ", ".join(before.key) or "none", ", ".join(after.key) or "none"
        return Refuse(f"the key of {before.label} was ({was}), is ({now})", again)
    chosen_anew = before.column_list and (
        change.dropped or any(column.attnum <= before.attnums for column in change.added)
    )
    if chosen_anew or (before.where, before.column_list) != (after.where, after.column_list):
        return Refuse(f"the rule for {before.label} in source.tables has been changed", again)

    if relation is None and before.to_dict() == after.to_dict():
        return Unchanged()
    leaves = {leaf.oid: leaf for leaf in before.leaves}
    if leaves.keys() != {leaf.oid for leaf in after.leaves}:
        return Reread("its partitions have changed")
    if any(may_have_missed_changes(leaves[leaf.oid], leaf) for leaf in after.leaves):
        return Reread("changes of it may not have been published, or logged, for a while")
    if has_other_keys(before, after):
        return Reread("its rows may have had other keys for a while")
    if changes_texts(before.columns, after.columns):
        return Reread("the composition of its types has changed")
    rewritten = any(leaves[leaf.oid].filenode != leaf.filenode for leaf in after.leaves)
    if relation is None and not change.changes_columns:
        stamps = {column.attnum: column.xmin for column in before.columns}
        if rewritten and any(stamps.get(column.attnum) != column.xmin for column in after.columns):
            return Reread("its rows have been rewritten")
        return FollowChange(after)
    if relation is not None and not fits(after, relation):
        return Reread("its definition has changed again since")
    if rewritten:
        return Reread("its rows have been rewritten")
    if change.replaced:
        return Reread("a column has taken the name of another one")
    if change.added and (change.dropped or after.attnums - before.attnums != len(change.added)):
        return Reread("columns have been dropped and added")
    if not all(column.uniform for column in change.added):
        return Reread("the rows of its partitions have different values in an added column")
    return FollowChange(after)


def fits(table: Table, relation: Relation) -> bool:
    """Return whether changes with this description in the log have the format of the table's definition.

    Partitions may have their columns in another order than their root, and their own names. A publication of another
    owner may have columns that are not captured: those that the rule does not choose, and generated ones.
    """
    captured = {column.name for column in table.columns}
    defined = [(column.name, column.type_oid, column.type_modifier) for column in table.columns]
    described = [
        (column.name, column.type_oid, column.type_modifier)
        for column in relation.columns
        if column.name in captured or not (table.column_list or column.name in table.generated)
    ]
    if table.kind == "p":
        defined.sort()
        described.sort()
    elif (table.schema, table.name) != (relation.schema, relation.name):
        return False
    if defined != described or table.replica_identity != relation.replica_identity:
        return False
    return table.replica_identity == "f" or {c.name for c in relation.columns if c.key} == set(table.key)


@dataclass(frozen=True)
class FormatChange:
    """The first changes in a piece whose format is not the recorded one.

    :param label: the table.
    :param commit_lsn: LSN of the commit record of their transaction.
    :param inside: whether the piece begins inside that transaction.
    """

    label: str
    commit_lsn: LogPosition
    relation: Relation
    inside: bool


def first_format_change(
    decoded: Sequence[Changes],
    tables: Mapping[int, Sequence[Table]],
    snapshots: Mapping[str, Sequence[Snapshot]],
    opened: int,
) -> FormatChange | None:
    """Find the first changes that do not fit their table's definition and are not contained in its chunks.

    :param tables: captured tables by the oid of each of their leaves.
    :param snapshots: by label, those of the table's chunks while they filter.
    :param opened: commit LSN of the transaction inside of which the piece begins, or 0.
    """
    found: FormatChange | None = None
    for changes in decoded:
        for table in tables.get(changes.relation.oid, ()):
            if not len(changes.op) or fits(table, changes.relation):
                continue
            chunks = snapshots.get(table.label, ())
            outside = np.flatnonzero(seen_by(changes.xid, chunks) < max(len(chunks), 1))
            if not outside.size:
                continue
            lsn = LogPosition(int(changes.commit_lsn[outside[0]]))
            if found is None or lsn < found.commit_lsn:
                found = FormatChange(table.label, lsn, changes.relation, lsn == opened)
    return found
