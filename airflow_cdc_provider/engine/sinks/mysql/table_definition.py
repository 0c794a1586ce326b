"""The definition of a target table of the MySQL sink: its creation from the source table, and its changes. Pure.

In a mirror, the target has the source's columns. In a changelog, the history stays: a column that the source has
dropped is kept, but gets no more values.

A change is one ALTER TABLE, which the server applies completely or not at all, even if it crashes. The same statement
writes a comment to the table that identifies the attempt, so that later processes can see whether it was applied (see
:mod:`.record`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.core.errors import CannotFollow, UncapturableTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Table
from airflow_cdc_provider.engine.sinks.mysql import limits
from airflow_cdc_provider.engine.sinks.mysql.bulk_load import Field, constant
from airflow_cdc_provider.engine.sinks.mysql.session import quoted
from airflow_cdc_provider.engine.sinks.mysql.types import (
    COUNTER,
    LETTER,
    MOMENT,
    POSITION,
    WORDS,
    MysqlColumnType,
    column_types,
)
from airflow_cdc_provider.engine.sinks.staged import RowsNeeded

Mode = Literal["mirror", "changelog"]

CHANGELOG_COLUMNS: Mapping[str, MysqlColumnType] = {
    "_op": LETTER,
    "_commit_lsn": POSITION,
    "_seq": COUNTER,
    "_xid": POSITION,
    "_commit_ts": MOMENT,
    "_before": WORDS,
    "_unchanged": WORDS,
}
"""Names and types of a changelog's additional columns; an LSN is a number, so that it sorts."""

VIEW_INDEX = "airflow_cdc_"
"""Prefix of the names of indexes that the upkeep of views needs."""

_REQUIRED = ("_op", "_commit_lsn", "_seq")
# InnoDB's own columns, in any case.
_RESERVED = ("db_row_id", "db_trx_id", "db_roll_ptr", "fts_doc_id")
_OLD_NAMES = "#mysql50#"
_LONGEST_NAME = 64
_MARIADB_COLLATION = "utf8mb4_nopad_bin"
_INTEGERS = ("SMALLINT", "INT", "BIGINT")
_AS_TEXT = ("SMALLINT", "INT", "INT UNSIGNED", "BIGINT", "DATE", "CHAR(36)")
_SIZED = re.compile(r"(VARCHAR|VARBINARY|DECIMAL)\((\d+)(?:,(\d+))?\)")


def comment(pipeline: str, token: str = "") -> str:
    """Return the comment on a table that the pipeline has created or changed."""
    return f"airflow_cdc {pipeline} {token}".strip()


def refuse_names(target: Target, mode: Mode, collation: str) -> None:
    """Refuse a table that MySQL cannot have: names are compared without regard to case, and rows have limits.

    :raises UncapturableTable: naming the obstacle.
    """
    names = [column.name for column in target.table.columns]
    every = names + (list(CHANGELOG_COLUMNS) if mode == "changelog" else [])
    trouble = ""
    twice = [name for name, count in Counter(name.lower() for name in every).items() if count > 1]
    odd = [
        n
        for n in (target.schema, target.name, *names)
        if n != n.rstrip() or len(n) > _LONGEST_NAME or max(n) > "\uffff" or n.startswith(_OLD_NAMES)
    ]
    if twice:
        same = " and ".join(repr(name) for name in every if name.lower() == twice[0])
        trouble = f"MySQL treats the names of its columns {same} as equal"
    elif odd:
        trouble = f"MySQL does not allow a name like {odd[0]!r}"
    elif reserved := [name for name in names if name.lower() in _RESERVED]:
        trouble = f"InnoDB reserves the column {reserved[0]} in every table"
    elif mode == "mirror" and not target.table.key:
        trouble = "it has no key, which a mirror in MySQL needs"
    else:
        mirror = mode == "mirror"
        columns, key = columns_of(target.table, mode, collation), target.table.key if mirror else ()
        trouble = limits.exceeded_limit(columns, key, mirror, collation == _MARIADB_COLLATION)
    if trouble:
        raise UncapturableTable(
            f"{target.table.label} cannot be copied to MySQL: {trouble}",
            "Choose its columns with `columns` in the pipeline file, give it a key, or do not capture it.",
        )


def columns_of(table: Table, mode: Mode, collation: str) -> dict[str, str]:
    """Return the definitions of a target's columns, by name."""
    kinds = column_types(table)
    found = {
        column.name: _column(kinds[column.name], collation, column.name in table.key, mode) for column in table.columns
    }
    if mode == "changelog":
        for name, kind in CHANGELOG_COLUMNS.items():
            found[name] = kind.definition(collation) + (" NOT NULL" if name in _REQUIRED else "")
    return found


def _column(kind: MysqlColumnType, collation: str, key: bool, mode: Mode) -> str:
    return kind.definition(collation) + (" NOT NULL" if key and mode == "mirror" else " NULL")


def create_table(target: Target, mode: Mode, collation: str, pipeline: str, name: str = "") -> str:
    """Return the statement that creates a target table.

    :param name: its quoted name, if it differs from the target's.
    :raises UncapturableTable: when MySQL cannot have such a table.
    """
    refuse_names(target, mode, collation)
    lines = [f"{quoted(name)} {kind}" for name, kind in columns_of(target.table, mode, collation).items()]
    if mode == "mirror":
        lines.append(f"PRIMARY KEY ({', '.join(map(quoted, target.table.key))})")
    else:
        lines.append("KEY (`_commit_lsn`, `_seq`)")
    body = ",\n  ".join(lines)
    return (
        f"CREATE TABLE {name or quoted(target.schema, target.name)} (\n  {body}\n) ENGINE=InnoDB ROW_FORMAT=DYNAMIC"
        f" CHARACTER SET utf8mb4 COLLATE {collation} COMMENT='{comment(pipeline)}'"
    )


def alteration(
    shape: Table,
    target: Target,
    mode: Mode,
    collation: str,
    present: Sequence[str],
    rows_stay: bool,
) -> list[str]:
    """Return the clauses of an ALTER TABLE that changes a table to a new definition; none if nothing has to change.

    :param shape: the recorded definition of the target table.
    :param present: names of the columns that the table actually has.
    :param rows_stay: rows keep their values, and get those of added columns. Otherwise a mirror has no rows.
    :raises RowsNeeded: when only the source has the values that the rows need.
    :raises CannotFollow: when old values of a changelog cannot be converted.
    """
    refuse_names(target, mode, collation)
    change = redefinition(shape, target.table)
    old, new = columns_of(shape, mode, collation), columns_of(target.table, mode, collation)
    kinds = column_types(target.table)
    there = {name.lower() for name in present}
    clauses: list[str] = []
    if mode == "mirror":
        clauses += [f"DROP COLUMN {quoted(name)}" for name in change.dropped if name.lower() in there]
    former = {new_name: old_name for old_name, new_name in change.renamed}
    added = {column.name: column for column in change.added}
    for column in target.table.columns:
        before = former.get(column.name, column.name)
        if column.name in added:
            if column.name.lower() not in there | {name.lower() for name in former}:
                # An expression in parentheses, which is allowed for texts too.
                value = column.missing if rows_stay else None
                field = Field(column.name, kinds[column.name])
                default = "" if value is None else f" DEFAULT ({constant(field, value, target.table.label)})"
                clauses.append(f"ADD COLUMN {quoted(column.name)} {new[column.name]}{default}")
            elif rows_stay:
                raise RowsNeeded(f"the target already has a column {column.name}")
            else:
                clauses.append(f"MODIFY COLUMN {quoted(column.name)} {new[column.name]}")
            continue
        if before.lower() not in there:
            if mode == "mirror" and column.name in target.table.key and rows_stay:
                raise CannotFollow(
                    f"the target table {target.schema}.{target.name} has no column {before}, which is part of its key",
                    "If the column was renamed, restore its name, then start again.",
                )
            if rows_stay:
                raise RowsNeeded(f"the target has no column {before}")
            clauses.append(f"ADD COLUMN {quoted(column.name)} {new[column.name]}")
            continue
        if old[before] != new[column.name]:
            _require_conversion(old[before], new[column.name], column, target, mode, rows_stay)
        elif before == column.name:
            continue
        clauses.append(f"CHANGE COLUMN {quoted(before)} {quoted(column.name)} {new[column.name]}")
    if mode == "mirror" and change.key:
        if rows_stay:
            raise RowsNeeded("the key has changed")
        clauses += ["DROP PRIMARY KEY", f"ADD PRIMARY KEY ({', '.join(map(quoted, target.table.key))})"]
    return clauses


def _require_conversion(old: str, new: str, column: Column, target: Target, mode: Mode, rows_stay: bool) -> None:
    if _keeps(old, new) or (mode == "mirror" and not rows_stay):
        return
    if rows_stay:
        raise RowsNeeded(f"only the source can convert {column.name} to {column.type}")
    raise CannotFollow(
        f"the changelog {target.schema}.{target.name} cannot be changed like {target.table.label} because the old"
        f" values of {column.name} cannot become {column.type} without loss",
        f"Nothing from this change on has been applied. Rename the column {column.name} of the changelog, then start"
        " again: a new column is added.",
    )


def _keeps(old: str, new: str) -> bool:
    """Return whether a column's type can be changed so that every value keeps its text."""
    old, new = (each.partition(" CHARACTER SET ")[0].removesuffix(" NULL").removesuffix(" NOT") for each in (old, new))
    if old == new:
        return True
    if old in _INTEGERS and new in _INTEGERS:
        return _INTEGERS.index(old) < _INTEGERS.index(new)
    before, after = _SIZED.fullmatch(old), _SIZED.fullmatch(new)
    if before and after:
        return before[1] == after[1] and before[3] == after[3] and int(before[2]) <= int(after[2])
    if new in ("LONGTEXT",):
        return old in _AS_TEXT or bool(before and before[1] != "VARBINARY")
    return new == "LONGBLOB" and bool(before and before[1] == "VARBINARY")


@dataclass(frozen=True)
class Differing:
    """A column that a table lacks, or has with a type that does not preserve the source's values.

    :param found: its type as reported by the server; empty if it is missing.
    :param wanted: its definition.
    """

    name: str
    found: str
    wanted: str

    def __str__(self) -> str:
        expected = self.wanted.partition(" CHARACTER SET ")[0].partition(" ")[0]
        return f"column {self.name} is {self.found or 'missing'}, but must be {expected}"

    @property
    def clause(self) -> str:
        """Return the clause of an ALTER TABLE that corrects the column."""
        return f"{'MODIFY' if self.found else 'ADD'} COLUMN {quoted(self.name)} {self.wanted}"


def differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[Differing]:
    """Return the columns that differ from their definitions; wider numbers and longer keys are accepted.

    :param found: types of the table's columns as reported by the server, by name.
    :param wanted: their definitions.
    """
    names = {name.lower(): kind for name, kind in found.items()}
    compared = [Differing(name, names.get(name.lower(), ""), kind) for name, kind in wanted.items()]
    return [each for each in compared if each.found != _type_of_definition(each.wanted) and not _is_wider(each)]


def _is_wider(column: Differing) -> bool:
    """Return whether a column's type keeps every value, with the same text."""
    there = column.found.upper()
    return there.startswith((*_INTEGERS, "VARCHAR", "VARBINARY", "DECIMAL")) and _keeps(column.wanted, there)


def _type_of_definition(definition: str) -> str:
    """Return a definition's type in the form of :func:`normalized_type`."""
    return normalized_type(definition.partition(" CHARACTER SET ")[0].removesuffix(" NULL").removesuffix(" NOT"))


def normalized_type(text: str) -> str:
    """Return a type in a comparable form: in lower case, integers without display width."""
    return re.sub(r"\b(smallint|int|bigint)\(\d+\)", r"\1", text.lower())
