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

from airflow_cdc_provider.engine.changes.snapshot_filter import seen_by
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog import Column, Leaf, Table
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import Changes, Relation


@dataclass(frozen=True)
class Redefinition:
    """What makes the columns of one definition those of another.

    :param renamed: old and new names.
    :param dropped: names.
    :param added: columns whose name was free.
    :param retyped: columns, under their new names, whose type or collation is another one.
    :param replaced: names under which there is another column than before.
    :param key: the key is made of other columns.
    """

    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    added: tuple[Column, ...]
    retyped: tuple[Column, ...]
    replaced: tuple[str, ...]
    key: bool

    @property
    def changes_columns(self) -> bool:
        """Whether the columns are not those that they were."""
        return bool(self.renamed or self.dropped or self.added or self.retyped or self.replaced)


def redefinition(before: Table, after: Table) -> Redefinition:
    """Compare two definitions; columns are the same by number, and those that are left by name."""
    numbers = {column.attnum: column for column in before.columns} if before.oid == after.oid else {}
    pairs = [(numbers.pop(column.attnum, None), column) for column in after.columns]
    kept = [(old, new) for old, new in pairs if old is not None]
    new_names = {new.name: new for old, new in pairs if old is None}
    known = {old.name for old, _ in kept}
    left = {column.name: column for column in before.columns if column.name not in known}
    replaced = tuple(name for name in left if name in new_names)
    same = kept + [(left[name], new_names[name]) for name in replaced]
    origin = {new.name: old.name for old, new in same}
    # A name that one column has left and another has taken stands for another column, too.
    taken = [new.name for old, new in kept if old.name != new.name and new.name in known | set(left)]
    taken += [name for name in new_names if name in known]
    return Redefinition(
        renamed=tuple((old.name, new.name) for old, new in same if old.name != new.name),
        dropped=tuple(name for name in left if name not in replaced),
        added=tuple(column for name, column in new_names.items() if name not in replaced),
        retyped=tuple(new for old, new in same if (old.type, old.collation) != (new.type, new.collation)),
        replaced=(*replaced, *taken),
        key={origin.get(name) for name in after.key} != set(before.key),
    )


def has_other_keys(before: Table, after: Table) -> bool:
    """Whether rows that are one by the key of one definition may be two by that of the other, unless the log tells so.

    It does not tell of collations, of what types are made of, and under FULL of no key at all.
    """
    collations = [[column.collation for column in table.key_columns] for table in (before, after)]
    return (
        before.key_constraint != after.key_constraint
        or collations[0] != collations[1]
        or reads_otherwise(before.key_columns, after.key_columns)
    )


def reads_otherwise(before: Sequence[Column], after: Sequence[Column]) -> bool:
    """Whether values that columns have had read otherwise now, as what their types are made of has changed.

    A label that an enum did not have before is in no value from before.
    """
    now = {column.attnum: column.parts or {} for column in after}
    return any(
        now[column.attnum].get(name) != content
        for column in before
        if column.attnum in now
        for name, content in (column.parts or {}).items()
    )


def has_silent_key(table: Table) -> bool:
    """Whether the log does not tell when the table gets another key."""
    return table.replica_identity == "f" or any(column.collation is not None for column in table.key_columns)


def has_silent_identity(table: Table) -> bool:
    """Whether the log does not tell when what tells the table's rows apart becomes another."""
    return has_silent_key(table) or any(column.parts for column in table.key_columns)


def has_been_away(before: Leaf, after: Leaf) -> bool:
    """Whether rows of a leaf may have been changed while the log did not tell of it.

    So it is while it is detached, or in another schema, and published by way of its ancestors or its schema alone; or
    while it is UNLOGGED. What Postgres does to it when that ends, no other change does; but for a leaf without a TOAST
    table, of which a rewrite for any reason looks the same.
    """
    if before.place not in ("", after.place):
        return True
    if before.filenode == after.filenode or before.toast is None or after.streamed:
        return False
    return before.toast == 0 or before.toast != after.toast


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
    commit_lsn: int
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
            lsn = int(changes.commit_lsn[outside[0]])
            if found is None or lsn < found.commit_lsn:
                found = Misfit(table.label, lsn, changes.relation, lsn == opened)
    return found
