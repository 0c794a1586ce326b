"""Compares two definitions of a table, to find the changes that its target needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.table import Column, Leaf, Table


@dataclass(frozen=True)
class Redefinition:
    """The differences between the columns of two definitions.

    :param renamed: old and new names.
    :param dropped: names.
    :param added: columns whose name was free.
    :param retyped: columns, under their new names, whose type or collation has changed.
    :param replaced: names under which there is another column than before.
    :param key: whether the key consists of other columns.
    """

    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    added: tuple[Column, ...]
    retyped: tuple[Column, ...]
    replaced: tuple[str, ...]
    key: bool

    @property
    def changes_columns(self) -> bool:
        """Return whether any column has changed."""
        return bool(self.renamed or self.dropped or self.added or self.retyped or self.replaced)


def redefinition(before: Table, after: Table) -> Redefinition:
    """Compare two definitions; columns are matched by number, the remaining ones by name."""
    numbers = {column.attnum: column for column in before.columns} if before.oid == after.oid else {}
    pairs = [(numbers.pop(column.attnum, None), column) for column in after.columns]
    kept = [(old, new) for old, new in pairs if old is not None]
    new_names = {new.name: new for old, new in pairs if old is None}
    known = {old.name for old, _ in kept}
    left = {column.name: column for column in before.columns if column.name not in known}
    replaced = tuple(name for name in left if name in new_names)
    same = kept + [(left[name], new_names[name]) for name in replaced]
    origin = {new.name: old.name for old, new in same}
    # A name that one column has given up and another has taken belongs to another column, too.
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
    """Return whether the two keys may differ in which rows they hold to be equal, without a sign of that in the log.

    The log does not show collations, nor what types are composed of, and under FULL no key at all.
    """
    collations = [[column.collation for column in table.key_columns] for table in (before, after)]
    return (
        before.key_constraint != after.key_constraint
        or collations[0] != collations[1]
        or changes_texts(before.key_columns, after.key_columns)
    )


def changes_texts(before: Sequence[Column], after: Sequence[Column]) -> bool:
    """Return whether the texts of old values have changed, because of changes in what the columns' types consist of.

    A new label of an enum changes nothing, since no old value has it.
    """
    now = {column.attnum: column.parts or {} for column in after}
    return any(
        now[column.attnum].get(name) != content
        for column in before
        if column.attnum in now
        for name, content in (column.parts or {}).items()
    )


def has_unlogged_key_changes(table: Table) -> bool:
    """Return whether the log does not show when the table gets another key."""
    return table.replica_identity == "f" or any(column.collation is not None for column in table.key_columns)


def has_unlogged_identity_changes(table: Table) -> bool:
    """Return whether the log does not show every change of what identifies the table's rows."""
    return has_unlogged_key_changes(table) or any(column.parts for column in table.key_columns)


def may_have_missed_changes(before: Leaf, after: Leaf) -> bool:
    """Return whether rows of a leaf may have been changed without a trace in the log.

    That is possible while it is detached or in another schema, if it is published only through its ancestors or its
    schema, and while it is UNLOGGED. The end of that state leaves signs in the catalog that no other change leaves. The
    exception is a leaf without a TOAST table, for which any rewrite looks the same.
    """
    if before.place not in ("", after.place):
        return True
    if before.filenode == after.filenode or before.toast is None or after.streamed:
        return False
    return before.toast == 0 or before.toast != after.toast
