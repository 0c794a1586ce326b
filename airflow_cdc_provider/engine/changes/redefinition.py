"""What a table's new definition asks of its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.table import Column, Leaf, Table


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
