"""The tables of a view in MySQL: their columns come from the server, which knows the types of a SELECT."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.table_definition import VIEW_INDEX, comment
from airflow_cdc_provider.engine.sinks.mysql.types import INDEX_BYTES
from airflow_cdc_provider.engine.views.definition import View

_PROBE = quoted("airflow_cdc", "cdc_probe")
_CHARACTER_BYTES = 4
_LONGEST_PREFIX = 255
_SIZED = re.compile(r"(var)?(char|binary)\((\d+)\)")


@dataclass(frozen=True)
class ViewColumn:
    """A column of a view's table.

    :param type: its type as reported by the server.
    :param collation: its collation; empty if it has none.
    """

    name: str
    type: str
    collation: str

    @property
    def definition(self) -> str:
        """Return its type as SQL, without NULL or NOT NULL."""
        return f"{self.type} COLLATE {self.collation}" if self.collation else self.type

    def key_part(self, name: str, columns: int) -> str:
        """Return its part in an index; of long values only the beginning.

        :param columns: number of columns in the index, which share its size.
        """
        return f"{quoted(name)}{key_prefix(self.type, columns)}"


def key_prefix(kind: str, columns: int) -> str:
    """Return the length of the beginning of a value that an index has, in parentheses; empty for the whole value.

    :param kind: type as reported by the server.
    """
    share = INDEX_BYTES // columns
    sized = _SIZED.match(kind.lower())
    binary = "blob" in kind.lower() or "binary" in kind.lower()
    most = share if binary else share // _CHARACTER_BYTES
    if sized:
        return f"({most})" if int(sized[3]) > most else ""
    return f"({min(most, _LONGEST_PREFIX)})" if kind.lower().endswith(("text", "blob")) else ""


def anchor_index(view: View) -> str:
    """Return the name of the index on the anchor of a view's table."""
    return "PRIMARY" if view.one_row and not view.grouped else f"{VIEW_INDEX}anchor"


def quoted_tables(targets: Mapping[str, Target]) -> dict[str, str]:
    """Return the quoted target tables by label."""
    return {label: quoted(target.schema, target.name) for label, target in targets.items()}


@contextmanager
def probed(session: Session, select: str) -> Iterator[list[ViewColumn]]:
    """Let the server evaluate a SELECT without rows; yield its columns. This does not end a transaction."""
    session.run(f"CREATE TEMPORARY TABLE {_PROBE} AS {select} LIMIT 0")
    try:
        found = session.rows(f"SHOW FULL COLUMNS FROM {_PROBE}")
        yield [ViewColumn(str(name), str(kind), str(collation or "")) for name, kind, collation, *_ in found]
    finally:
        session.run(f"DROP TEMPORARY TABLE {_PROBE}")


def create_rows(view: View, columns: Sequence[ViewColumn], name: str, pipeline: str) -> str:
    """Return the statement that creates the table of a view's rows."""
    by_name = {column.name: column for column in columns}
    anchor = [each.output for each in view.anchor]
    keyed = anchor_index(view) == "PRIMARY"
    lines = [
        f"{quoted(each.name)} {each.definition} {'NOT NULL' if keyed and each.name in anchor else 'NULL'}"
        for each in columns
    ]
    parts = [by_name[output].key_part(output, len(anchor)) for output in anchor]
    lines.append(f"{'PRIMARY KEY' if keyed else f'KEY {anchor_index(view)}'} ({', '.join(parts)})")
    return _create(quoted("airflow_cdc", name), lines, pipeline)


def create_queue(view: View, columns: Sequence[ViewColumn], name: str, pipeline: str) -> str:
    """Return the statement that creates the table of a view's queue."""
    by_name = {column.name: column for column in columns}
    lines = ["id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY"]
    lines += [f"a{n} {by_name[each.output].definition} NULL" for n, each in enumerate(view.anchor)]
    return _create(quoted("airflow_cdc", name), lines, pipeline)


def _create(table: str, lines: Sequence[str], pipeline: str) -> str:
    return f"CREATE TABLE {table} ({', '.join(lines)}) ENGINE=InnoDB ROW_FORMAT=DYNAMIC COMMENT='{comment(pipeline)}'"
