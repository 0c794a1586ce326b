"""How a captured table's definition has changed at the source, and whether the stream can follow. Pure decisions.

Postgres describes a relation before its first change after DDL, so that in the log DDL shows in order, if only by what
follows it. Columns have numbers that outlive renaming and are never used again, so that two definitions tell
what happened in between: as long as the catalog still says what the log says, no table was rewritten, and nothing
else hides between the two.

DDL that changes columns locks the table against everybody who has written to it. So in the order of commits the formats
of a table's changes follow each other, and whoever sees the DDL sees every change in an older format. That makes
reading the table again right in all cases in which the change cannot be followed exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from airflow_cdc_provider.engine.changes.redefinition import (
    has_been_away,
    has_other_keys,
    reads_otherwise,
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
class Follow:
    """The target can be changed alike, between the changes before and after; its rows stay.

    :param table: the new definition; without a change of columns it is only to be recorded.
    """

    table: Table


@dataclass(frozen=True)
class Adopt:
    """The table has to be read again under its new definition; ``why`` for the log."""

    why: str


@dataclass(frozen=True)
class Refuse:
    """The pipeline has to stop before the first change that is concerned."""

    message: str
    solution: str


Verdict = Unchanged | Follow | Adopt | Refuse


def decide(before: Table, after: Table | CdcError, relation: Relation | None = None) -> Verdict:
    """Decide what to do about a table whose definition may have changed.

    :param before: the recorded definition. Everything up to where the stream is has been applied under it.
    :param after: what the catalog says now, or why it says nothing that can be captured.
    :param relation: how the log describes the table from here on, if that is known. If not, nothing in another
        format than ``before`` comes before the moment at which ``after`` was read.
    """
    if isinstance(after, CdcError):
        return Refuse(after.message, after.solution)
    again = (
        f"Take the change back and start again; or run `airflow-cdc resnapshot --table '{before.label}'`, which reads"
        " the table again as it is now, and go on."
    )
    change = redefinition(before, after)
    if after.oid != before.oid:
        return Refuse(f"{before.label} has been dropped and made anew", again)
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
        return Adopt("its partitions are others")
    if any(has_been_away(leaves[leaf.oid], leaf) for leaf in after.leaves):
        return Adopt("changes of it may not have been published, or logged, for a while")
    if has_other_keys(before, after):
        return Adopt("its rows may have had other keys for a while")
    if reads_otherwise(before.columns, after.columns):
        return Adopt("what its types are made of has changed")
    rewritten = any(leaves[leaf.oid].filenode != leaf.filenode for leaf in after.leaves)
    if relation is None and not change.changes_columns:
        stamps = {column.attnum: column.xmin for column in before.columns}
        if rewritten and any(stamps.get(column.attnum) != column.xmin for column in after.columns):
            return Adopt("its rows have been rewritten")
        return Follow(after)
    if relation is not None and not fits(after, relation):
        return Adopt("its definition has changed again since")
    if rewritten:
        return Adopt("its rows have been rewritten")
    if change.replaced:
        return Adopt("a column has taken another one's name")
    if change.added and (change.dropped or after.attnums - before.attnums != len(change.added)):
        return Adopt("columns have been dropped and added")
    if not all(column.uniform for column in change.added):
        return Adopt("the rows of its partitions have different values in an added column")
    return Follow(after)


def fits(table: Table, relation: Relation) -> bool:
    """Whether changes that the log describes so are changes of the table as it is defined.

    Partitions may have their columns in another order than their root, and names of their own. A publication that
    somebody else has made may have columns that are not captured: those that the rule does not choose, and generated
    ones.
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
class Misfit:
    """The first changes in a piece whose format is not the recorded one.

    :param label: the table.
    :param commit_lsn: commit record of their transaction.
    :param inside: the piece begins inside that transaction.
    """

    label: str
    commit_lsn: LogPosition
    relation: Relation
    inside: bool


def first_misfit(
    decoded: Sequence[Changes],
    tables: Mapping[int, Sequence[Table]],
    snapshots: Mapping[str, Sequence[Snapshot]],
    opened: int,
) -> Misfit | None:
    """Find the first changes that do not fit their table's definition and are not in its chunks anyway.

    :param tables: captured tables by the oid of each of their leaves.
    :param snapshots: by label, those of the table's chunks while they filter.
    :param opened: commit LSN of the transaction that the piece begins inside of, 0 without.
    """
    found: Misfit | None = None
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
                found = Misfit(table.label, lsn, changes.relation, lsn == opened)
    return found
