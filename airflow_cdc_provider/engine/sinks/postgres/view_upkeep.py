"""Finds the anchors of views that a transaction affects, in Postgres; see :mod:`.transactional.view_upkeep`.

For each table that views read there is a temporary table of images, with a row for each noted row: its key ``k0`` …,
whether it existed (``was``), and the columns that views read, ``r0`` …; or only its key. Images are compared with
``*=``, which is exact: for ``=``, the numerics 1.0 and 1.00 are equal, and JSON cannot be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from psycopg2 import sql

from airflow_cdc_provider.engine.core.effect import COUNT
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows
from airflow_cdc_provider.engine.sinks.postgres.staging_tables import PostgresTableStatements
from airflow_cdc_provider.engine.sinks.postgres.view_record import end_version, record_work
from airflow_cdc_provider.engine.sinks.postgres.view_rows import ViewRows, listed
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.sinks.transactional.view_upkeep import Images, ViewUpkeep
from airflow_cdc_provider.engine.views.version import ViewVersion

SETTINGS = """
SET LOCAL jit = off;
SET LOCAL work_mem = '32MB';
SET LOCAL random_page_cost = 1.1;
SET LOCAL cpu_tuple_cost = 0.05;
SET LOCAL cpu_index_tuple_cost = 0.02;
"""
"""Settings of the transaction. Compiling takes longer than these queries. With the default costs, the planner reads a
table of a million rows as a whole to find 58,000 of them by key, which takes four times as long as to look them up.
"""


class PostgresViewUpkeep(ViewUpkeep):
    """The upkeep of views in a transaction of a Postgres sink."""

    def __init__(
        self, connection: Connection, pipeline: str, targets: Mapping[str, Target], versions: Sequence[ViewVersion]
    ) -> None:
        super().__init__(targets, versions)
        self._connection = connection
        self._pipeline = pipeline

    def _begin(self, label: str, columns: Sequence[str]) -> Images:
        return _Images(self._connection, self._targets[label], columns, len(self._images))

    def _affected(self, version: ViewVersion) -> ViewRows:
        return ViewRows(self._connection, self._targets, version)

    def _execute(self, statement: str) -> None:
        rows(self._connection, statement)

    def _end(self, version: ViewVersion, before: LogPosition) -> None:
        end_version(self._connection, self._pipeline, version, before)

    def _record(self, version: ViewVersion, behind: LogPosition | None, anchors: int, seconds: float) -> None:
        record_work(self._connection, self._pipeline, version, behind, anchors, seconds)


class _Images(Images):
    """The images of a table's rows.

    :param read: the columns of the images.
    :param number: distinguishes the table from those of others.
    """

    def __init__(self, connection: Connection, target: Target, read: Sequence[str], number: int) -> None:
        self._connection = connection
        self._target = target
        self._statements = PostgresTableStatements(connection, target, "mirror")
        self.read = tuple(read)
        self._images = sql.Identifier("pg_temp", f"cdc_images_{number}")
        columns = [*self._numbered("t", target.table.key, "k"), sql.SQL("true AS was"), *self._numbered("t", read, "r")]
        self._run(
            "CREATE TEMPORARY TABLE {images} ON COMMIT DROP AS SELECT {columns} FROM {table} t WITH NO DATA",
            columns=listed(columns),
        )

    def _run(self, text: str, **parts: sql.Composable) -> list[tuple[object, ...]]:
        table = sql.Identifier(self._target.schema, self._target.name)
        return rows(self._connection, sql.SQL(text).format(images=self._images, table=table, **parts))

    @staticmethod
    def _numbered(relation: str, names: Sequence[str], prefix: str) -> list[sql.Composable]:
        return [sql.SQL(f"{relation}.{{}} AS {prefix}{n}").format(sql.Identifier(name)) for n, name in enumerate(names)]

    def _key(self, relation: str) -> list[sql.Composable]:
        """Return the key of an image."""
        return [sql.SQL(f"{relation}.k{n}") for n in range(len(self._target.table.key))]

    def note_staged(self, staged: Staged) -> None:
        """Note the rows with the keys of staged rows; without a key, the staged rows themselves."""
        if COUNT in staged.columns:
            places = {column.name: i for i, column in enumerate(self._target.table.columns)}
            read = [sql.SQL(f"s.c{places[name]}") for name in self.read]
            self._run(
                "INSERT INTO {images} SELECT true, {read} FROM {stage} s",
                read=listed(read),
                stage=self._statements.staged_rows(staged),
            )
            return
        key = self._statements.staged_key()
        if not self.read:
            self._run(
                "INSERT INTO {images} SELECT {key}, false FROM {stage} s",
                key=listed(key),
                stage=self._statements.staged_rows(staged),
            )
            return
        self._run(
            "INSERT INTO {images} SELECT {key}, {exists}, {read}"
            " FROM (SELECT * FROM {stage} s ORDER BY {key}) s LEFT JOIN {table} t ON {match}",
            key=listed(key),
            exists=self._exists(),
            read=listed(self._numbered("t", self.read, "r")),
            stage=self._statements.staged_rows(staged),
            match=self._statements.equal_to(key),
        )

    def _exists(self) -> sql.Composable:
        return sql.SQL("t.{} IS NOT NULL").format(sql.Identifier(self._target.table.key[0]))

    def note_rows(self, keys: Collection[tuple[str, ...]] | None) -> None:
        key, read = self._numbered("t", self._target.table.key, "k"), self._numbered("t", self.read, "r")
        found, match_ = self._given(keys)
        self._run(
            "INSERT INTO {images} SELECT {columns} FROM {found}{table} t{match}",
            columns=listed([*key, sql.SQL("true"), *read]),
            found=found,
            match=match_,
        )

    def _given(self, keys: Collection[tuple[str, ...]] | None) -> tuple[sql.Composable, sql.Composable]:
        if keys is None:
            return sql.SQL(""), sql.SQL("")
        given, values = self._statements.given_keys(sorted(keys))
        return sql.SQL("{} JOIN ").format(given), sql.SQL(" ON {}").format(self._statements.equal_to(values))

    def note_new(self, keys: Collection[tuple[str, ...]] | None) -> None:
        if not self._target.table.key:
            self.note_rows(None)
            return
        found, match_ = self._given(keys)
        nothing = [sql.SQL("NULL")] * len(self.read)
        self._run(
            "INSERT INTO {images} SELECT {columns} FROM {found}{table} t{match}"
            " WHERE NOT EXISTS (SELECT FROM {images} i WHERE {same})",
            columns=listed([*self._numbered("t", self._target.table.key, "k"), sql.SQL("false"), *nothing]),
            found=found,
            match=match_,
            same=self._statements.equal_to(self._key("i")),
        )

    def anchors(self, key: Sequence[str]) -> str:
        columns = [sql.SQL(f"i.k{self._target.table.key.index(name)} AS a{n}") for n, name in enumerate(key)]
        query = sql.SQL("SELECT {} FROM {} i").format(listed(columns), self._images)
        return query.as_string(self._connection)

    def changed(self, read: Sequence[str], name: str) -> str:
        table = sql.Identifier("pg_temp", name)
        old = [sql.SQL(f"i.r{self.read.index(each)}") for each in read]
        if not self._target.table.key:
            columns = listed(sql.SQL(f"{{}} AS r{n}").format(each) for n, each in enumerate(old))
            self._run(
                "CREATE TEMPORARY TABLE {name} ON COMMIT DROP AS SELECT {columns} FROM {images} i",
                name=table,
                columns=columns,
            )
            return table.as_string(self._connection)
        new = [sql.SQL("t.{}").format(sql.Identifier(each)) for each in read]
        columns = listed(
            sql.SQL(f"CASE WHEN side.old THEN {{}} ELSE {{}} END AS r{n}").format(*pair)
            for n, pair in enumerate(zip(old, new, strict=True))
        )
        self._run(
            "CREATE TEMPORARY TABLE {name} ON COMMIT DROP AS SELECT {columns}"
            " FROM {images} i LEFT JOIN {table} t ON {match} CROSS JOIN (VALUES (true), (false)) AS side (old)"
            " WHERE NOT ROW(i.was, {old})::record *= ROW({exists}, {new})::record"
            " AND CASE WHEN side.old THEN i.was ELSE {exists} END",
            name=table,
            columns=columns,
            match=self._statements.equal_to(self._key("i")),
            exists=self._exists(),
            old=listed(old),
            new=listed(new),
        )
        return table.as_string(self._connection)
