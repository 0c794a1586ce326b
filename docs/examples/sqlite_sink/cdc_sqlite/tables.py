"""Target tables: columns store the text that Postgres writes, so nothing is lost and equal texts are equal values."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import repeat

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.core.errors import CannotFollow, ForeignTable, TargetConflict
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.staged import RowsNeeded, Staged
from airflow_cdc_provider.engine.sinks.transactional.target_table import TargetTable
from cdc_sqlite.store import listed, marks, quoted


def place(target: Target) -> str:
    """Return ``schema.name``: SQLite has no schemas, and one file per schema would break atomic commits."""
    return f"{target.schema}.{target.name}"


class SqliteTable(TargetTable):
    """One target table, changed in the transaction of ``connection``."""

    def __init__(self, connection: sqlite3.Connection, target: Target) -> None:
        self.mode = "mirror"
        self._run = connection.execute
        self._run_many = connection.executemany
        self._target = target
        self._table = quoted(place(target))
        self._names = [column.name for column in target.table.columns]
        self._key = [self._names.index(name) for name in target.table.key]

    # -- definition --------------------------------------------------------------------------------

    @property
    def columns(self) -> list[str]:
        """Return the names of the table's columns; empty if the table does not exist."""
        return [name for (name,) in self._run("SELECT name FROM pragma_table_info(?)", [place(self._target)])]

    def accept(self, ours: bool) -> None:
        """Create the table, or accept an existing one.

        :param ours: whether the table belongs to this pipeline; if not, it must be empty and have our definition.
        :raises ForeignTable: if it is not ours, and has rows or another definition.
        """
        definitions = [f"{quoted(name)} TEXT" for name in self._names]
        if self._key:
            definitions.append(f"PRIMARY KEY {listed(self._target.table.key)}")
        wanted = f"CREATE TABLE {self._table} ({', '.join(definitions)})"
        query = "SELECT sql FROM sqlite_master WHERE type IN ('table', 'view') AND name = ? COLLATE NOCASE"
        found = self._run(query, [place(self._target)]).fetchone()
        rows = f"SELECT 1 FROM {self._table} LIMIT 1"
        if found is not None and not ours and (found != (wanted,) or self._run(rows).fetchone()):
            raise ForeignTable(
                f"the table {place(self._target)} exists, and has rows or a definition that is not this pipeline's",
                "Drop or rename it, or set another target schema (`sink.schema`).",
            )
        if found != (wanted,):  # the definition differs, and all rows are about to be replaced
            self._run(f"DROP TABLE IF EXISTS {self._table}")
            self._run(wanted)

    def redefine(self, before: Target) -> None:
        """Drop and add columns.

        :raises RowsNeeded: if any other change requires reading the rows again.
        :raises CannotFollow: if an object in the target database depends on a column.
        """
        change = redefinition(before.table, self._target.table)
        if change.renamed or change.retyped or change.replaced or change.key:
            raise RowsNeeded(f"the values of {place(self._target)} have to be read from the source")
        if set(self.columns) != {column.name for column in before.table.columns}:
            raise RowsNeeded(f"the columns of {place(self._target)} were changed at the target")
        try:
            for name in change.dropped:
                self._run(f"ALTER TABLE {self._table} DROP COLUMN {quoted(name)}")
            for column in change.added:
                self._run(f"ALTER TABLE {self._table} ADD COLUMN {quoted(column.name)} TEXT")
                self._run(f"UPDATE {self._table} SET {quoted(column.name)} = ?", [column.missing])
        except sqlite3.OperationalError as e:
            raise CannotFollow(
                f"the table {place(self._target)} cannot be changed as {self._target.table.label} was: {e}",
                "Remove the dependent object at the target, then start again.",
            ) from e

    # -- rows read from the source -----------------------------------------------------------------

    def load(self, batches: Iterable[Sequence[Sequence[str | None]]]) -> int:
        """Load rows into a temporary table of this connection, which locks nothing, and return how many.

        :param batches: each a list of columns.
        """
        self._run(f"CREATE TEMP TABLE loaded {self._places()}")
        self._run("BEGIN")
        for batch in batches:
            self._run_many(f"INSERT INTO loaded VALUES {marks(len(self._names))}", zip(*batch, strict=True))
        self._run("COMMIT")
        return int(self._run("SELECT count(*) FROM loaded").fetchone()[0])

    def take_loaded(self) -> None:
        """Insert the loaded rows into the target."""
        self._run(f"INSERT INTO {self._table} {listed(self._names)} SELECT * FROM loaded")

    def delete(self, keys: frozenset[tuple[str, ...]] | None) -> None:
        """Delete the rows with the given keys, or all rows if ``None``."""
        if keys is None:
            self._run(f"DELETE FROM {self._table}")
        else:
            condition = f"{listed(self._target.table.key)} = {marks(len(self._key))}"
            self._run_many(f"DELETE FROM {self._table} WHERE {condition}", keys)

    def _places(self, chosen: Sequence[int] | None = None, prefix: str = "") -> str:
        """Return the engine's columns ``c0``, … as a column list or as a row of their values."""
        return listed([f"c{i}" for i in (range(len(self._names)) if chosen is None else chosen)], prefix)

    # -- staged rows -------------------------------------------------------------------------------

    def apply_mirror(self, staged: Staged) -> None:
        """Delete the rows at all staged keys, then insert the staged rows that are not ``erased``."""
        stage = quoted(str(staged.relation))
        # Free all keys before inserting, because a row may take the key that another row had.
        self._run(
            f"DELETE FROM {self._table} WHERE {listed(self._target.table.key)}"
            f" IN (SELECT {self._places(self._key)[1:-1]} FROM {stage})"
        )
        self._run(
            f"INSERT INTO {self._table} {listed(self._names)} SELECT {self._places()[1:-1]} FROM {stage}"
            " WHERE NOT erased"
        )

    def fill_missing(self, staged: Staged) -> set[tuple[str, ...]]:
        """Copy values that were not sent from the target; return the keys of rows that the target lacks."""
        stage = quoted(str(staged.relation))
        unsent = "replace(replace(s.missing, '{', ','), '}', ',')"  # ,1,3,
        values = [
            f"c{i} = CASE WHEN instr({unsent}, ',{i},') THEN t.{quoted(name)} ELSE s.c{i} END"
            for i, name in enumerate(self._names)
            if i not in self._key
        ]
        origin = listed([f"o{n}" for n in range(len(self._key))], "s.")
        self._run(
            f"UPDATE {stage} AS s SET missing = NULL, {', '.join(values)} FROM {self._table} AS t"
            f" WHERE s.missing IS NOT NULL AND {listed(self._target.table.key, 't.')} = {origin}"
        )
        query = f"SELECT {self._places(self._key)[1:-1]} FROM {stage} WHERE missing IS NOT NULL"
        return set(self._run(query).fetchall())

    def apply_counted(self, staged: Staged) -> None:
        """Add or remove copies of rows in a table without a key."""
        stage = quoted(str(staged.relation))
        insert = f"INSERT INTO {self._table} {listed(self._names)} VALUES {marks(len(self._names))}"
        equal = f"{listed(self._names)} IS {marks(len(self._names))}"
        for count, *row in self._run(f"SELECT count, {self._places()[1:-1]} FROM {stage} ORDER BY count"):
            there = 0 if count > 0 else self._run(f"DELETE FROM {self._table} WHERE {equal}", row).rowcount
            if there + count < 0:
                raise TargetConflict(
                    f"the table {place(self._target)} lacks rows that {self._target.table.label} has deleted, because"
                    " another process has changed it",
                    f"Run `airflow-cdc resnapshot --table {self._target.table.label}`, then start again.",
                )
            self._run_many(insert, repeat(row, there + count))
