"""How a target table of the MySQL sink is defined: created from its source table, and changed as that is. Pure.

In a mirror the target has the source's columns. In a changelog the history stays: a column that the source has dropped
is left as it is, and gets no values any more.

A change is one ALTER TABLE: the server makes it whole or not at all, also if it crashes. With it goes a comment on the
table that names the attempt, by which whoever comes later sees whether it was made (see :mod:`.record`).
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
from airflow_cdc_provider.engine.sinks.mysql.types import COUNTER, LETTER, MOMENT, POSITION, WORDS, Kind, kinds_of
from airflow_cdc_provider.engine.sinks.staged import RowsNeeded

Mode = Literal["mirror", "changelog"]

CHANGELOG_COLUMNS: Mapping[str, Kind] = {
    "_op": LETTER,
    "_commit_lsn": POSITION,
    "_seq": COUNTER,
    "_xid": POSITION,
    "_commit_ts": MOMENT,
    "_before": WORDS,
    "_unchanged": WORDS,
}
"""Names and kinds of the columns that a changelog has beside the source's; an LSN is a number, so that it sorts."""

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
    """What is said of a table that the pipeline has made or changed."""
    return f"airflow_cdc {pipeline} {token}".strip()


def refuse_names(target: Target, mode: Mode, collation: str) -> None:
    """Refuse a table that MySQL cannot have: names are compared without regard to case, and rows have limits.

    :raises UncapturableTable: naming what is in the way.
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
        trouble = f"its columns {same} have one name for MySQL"
    elif odd:
        trouble = f"MySQL takes no name like {odd[0]!r}"
    elif reserved := [name for name in names if name.lower() in _RESERVED]:
        trouble = f"InnoDB has a column {reserved[0]} of its own in every table"
    elif mode == "mirror" and not target.table.key:
        trouble = "it has no key, by which the rows of a mirror in MySQL are found"
    else:
        mirror = mode == "mirror"
        columns, key = columns_of(target.table, mode, collation), target.table.key if mirror else ()
        trouble = limits.trouble(columns, key, mirror, collation == _MARIADB_COLLATION)
    if trouble:
        raise UncapturableTable(
            f"{target.table.label} cannot be copied to MySQL: {trouble}",
            "Choose its columns by `columns` in the pipeline file, give it a key, or leave it out.",
        )


def columns_of(table: Table, mode: Mode, collation: str) -> dict[str, str]:
    """The definitions of a target's columns, by name."""
    kinds = kinds_of(table)
    found = {
        column.name: _column(kinds[column.name], collation, column.name in table.key, mode) for column in table.columns
    }
    if mode == "changelog":
        for name, kind in CHANGELOG_COLUMNS.items():
            found[name] = kind.definition(collation) + (" NOT NULL" if name in _REQUIRED else "")
    return found


def _column(kind: Kind, collation: str, key: bool, mode: Mode) -> str:
    return kind.definition(collation) + (" NOT NULL" if key and mode == "mirror" else " NULL")


def create_table(target: Target, mode: Mode, collation: str, pipeline: str, name: str = "") -> str:
    """The statement that creates a target table.

    :param name: its quoted name, if it is not to be the target's.
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
    """What an ALTER TABLE has to do to make a table of one definition one of another; nothing if it need not be made.

    :param shape: the definition that the target table has.
    :param present: names of the columns that it really has.
    :param rows_stay: its rows keep their values, and get those of added columns. Otherwise a mirror has no rows.
    :raises RowsNeeded: when the values that its rows need are the source's alone.
    :raises CannotFollow: when old values of a changelog cannot be converted.
    """
    refuse_names(target, mode, collation)
    change = redefinition(shape, target.table)
    old, new = columns_of(shape, mode, collation), columns_of(target.table, mode, collation)
    kinds = kinds_of(target.table)
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
                # An expression in parentheses, which text may have, too.
                value = column.missing if rows_stay else None
                field = Field(column.name, kinds[column.name])
                default = "" if value is None else f" DEFAULT ({constant(field, value, target.table.label)})"
                clauses.append(f"ADD COLUMN {quoted(column.name)} {new[column.name]}{default}")
            elif rows_stay:
                raise RowsNeeded(f"the target has a column {column.name} of its own")
            else:
                clauses.append(f"MODIFY COLUMN {quoted(column.name)} {new[column.name]}")
            continue
        if before.lower() not in there:
            if mode == "mirror" and column.name in target.table.key and rows_stay:
                raise CannotFollow(
                    f"the target table {target.schema}.{target.name} has no column {before}, which is of its key",
                    "If it has been renamed, give it its name back, then start again.",
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
            raise RowsNeeded("the key is another one")
        clauses += ["DROP PRIMARY KEY", f"ADD PRIMARY KEY ({', '.join(map(quoted, target.table.key))})"]
    return clauses


def _require_conversion(old: str, new: str, column: Column, target: Target, mode: Mode, rows_stay: bool) -> None:
    if _keeps(old, new) or (mode == "mirror" and not rows_stay):
        return
    if rows_stay:
        raise RowsNeeded(f"only the source can convert {column.name} to {column.type}")
    raise CannotFollow(
        f"the changelog {target.schema}.{target.name} cannot be changed as {target.table.label} was: the old values of"
        f" {column.name} do not become {column.type} without loss",
        f"Nothing from this change on has been applied. Rename the column {column.name} of the changelog, then start"
        " again: a new one is added.",
    )


def _keeps(old: str, new: str) -> bool:
    """Whether a column's type can be changed so that every value stays what it is, as text."""
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
    """A column that a table lacks, or has with a type that does not keep the source's values.

    :param found: its type as the server tells it; empty without it.
    :param wanted: its definition.
    """

    name: str
    found: str
    wanted: str

    def __str__(self) -> str:
        told = self.wanted.partition(" CHARACTER SET ")[0].partition(" ")[0]
        return f"column {self.name} is {self.found or 'missing'}, and has to be {told}"

    @property
    def clause(self) -> str:
        """What an ALTER TABLE has to do about it."""
        return f"{'MODIFY' if self.found else 'ADD'} COLUMN {quoted(self.name)} {self.wanted}"


def differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[Differing]:
    """Compare the columns of a table with those that it has to have; wider numbers and longer keys are as good.

    :param found: types of its columns as the server tells them, by name.
    :param wanted: their definitions.
    """
    names = {name.lower(): kind for name, kind in found.items()}
    compared = [Differing(name, names.get(name.lower(), ""), kind) for name, kind in wanted.items()]
    return [each for each in compared if each.found != _told(each.wanted) and not _is_wider(each)]


def _is_wider(column: Differing) -> bool:
    """Whether a column's type keeps every value, and writes it alike."""
    there = column.found.upper()
    return there.startswith((*_INTEGERS, "VARCHAR", "VARBINARY", "DECIMAL")) and _keeps(column.wanted, there)


def _told(definition: str) -> str:
    """A definition's type as :func:`told_type` gives it."""
    return told_type(definition.partition(" CHARACTER SET ")[0].removesuffix(" NULL").removesuffix(" NOT"))


def told_type(text: str) -> str:
    """A type as it is compared: in lower case, integers without a width for display."""
    return re.sub(r"\b(smallint|int|bigint)\(\d+\)", r"\1", text.lower())
