"""The versions of a pipeline's views in Postgres, and the steps that build them; see :mod:`.transactional.view_store`.

Indexes are built concurrently, outside of transactions; an index that a crash has left invalid is built again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ViewRefused
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.sinks.postgres.target_tables import ROOM_FOR_VIEWS
from airflow_cdc_provider.engine.sinks.postgres.view_record import (
    VIEWS,
    add_version,
    change_settings,
    change_version,
    end_version,
    has_views,
    read_versions,
    remove_version,
)
from airflow_cdc_provider.engine.sinks.postgres.view_rows import ViewRows, listed
from airflow_cdc_provider.engine.sinks.transactional.view_store import TooSlow, ViewStore
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion

# Readers of a view wait behind a lock that waits for readers, so it must not wait for long.
_EXCHANGE_LOCK = "2s"
_STEP_TIMEOUT = "20s"
_GRANTS = """
SELECT format('GRANT %%s ON %%s TO %%s%%s', string_agg(privilege_type, ', '), %s::text,
              CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
              CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
FROM pg_class, aclexplode(relacl) WHERE oid = to_regclass(%s) AND grantee <> relowner GROUP BY grantee, is_grantable
"""
_PROTECTED = """
SELECT EXISTS (
    SELECT FROM pg_class c WHERE c.oid = to_regclass(%s)
    AND (c.relrowsecurity OR EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid)
         OR EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal)))
"""
_INCONSISTENT = """
SELECT EXISTS (
    SELECT FROM airflow_cdc.chunks c JOIN airflow_cdc.pipelines p USING (pipeline)
    WHERE c.pipeline = %s AND (c.high_lsn IS NULL OR c.high_lsn > p.applied_lsn))
"""
_DEPENDENTS = (
    "The new version of the view is built. Drop what depends on the former table, such as an SQL view, then start"
    " again; create it again afterwards."
)
# Indexes whose first columns are the given ones, in any order.
_INDEXES = """
SELECT i.indexrelid::regclass::text, i.indisvalid FROM pg_index i
WHERE i.indrelid = to_regclass(%s) AND i.indpred IS NULL
  AND (SELECT array_agg(a.attname::text ORDER BY a.attname COLLATE "C")
       FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS u (attnum, position)
       LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = u.attnum
       WHERE u.position <= %s) = (SELECT array_agg(k ORDER BY k COLLATE "C") FROM unnest(%s::text[]) AS k)
"""


class PostgresViewStore(ViewStore):
    """The versions of views, in a transaction of a Postgres sink.

    :param applied: the applied LSN.
    """

    def __init__(
        self,
        connection: Connection,
        pipeline: str,
        views: Sequence[ViewSettings],
        targets: Mapping[str, Target],
        applied: LogPosition,
    ) -> None:
        super().__init__(views, targets)
        self._connection = connection
        self._pipeline = pipeline
        self._applied = applied

    def versions(self) -> list[ViewVersion]:
        return read_versions(self._connection, self._pipeline) if has_views(self._connection) else []

    def parse(self, settings: ViewSettings, tables: Mapping[str, Table]) -> View:
        from airflow_cdc_provider.engine.views.select_parser import parse_view  # late: executors do not need sqlglot

        return parse_view(settings, tables, "postgres")

    def checked(self, settings: ViewSettings) -> View:
        from airflow_cdc_provider.engine.sinks.postgres.view_checks import checked_view  # late, as above

        return checked_view(self._connection, settings, self.targets)

    def exists(self, version: ViewVersion) -> bool:
        return self._has(version.view.schema, version.relation)

    def taken(self, settings: ViewSettings) -> bool:
        return self._has(settings.schema, settings.name)

    def _has(self, schema: str, name: str) -> bool:
        relation = sql.Identifier(schema, name).as_string(self._connection)
        return scalar(self._connection, "SELECT to_regclass(%s)", [relation]) is not None

    def create_record(self) -> None:
        rows(self._connection, VIEWS)

    def add(self, settings: ViewSettings, view: View) -> None:
        add_version(self._connection, self._pipeline, settings, view)

    def resettle(self, version: ViewVersion, settings: ViewSettings) -> None:
        change_settings(self._connection, self._pipeline, version.number, settings)

    def end(self, version: ViewVersion) -> None:
        end_version(self._connection, self._pipeline, version, self._applied)

    def is_consistent(self) -> bool:
        return not scalar(self._connection, _INCONSISTENT, [self._pipeline])

    def _change(self, version: ViewVersion, **values: Any) -> None:
        change_version(self._connection, self._pipeline, version.number, **values)

    def _rows(self, version: ViewVersion) -> ViewRows:
        return ViewRows(self._connection, self.targets, version)

    def _run(self, text: str, **parts: sql.Composable) -> list[tuple[Any, ...]]:
        return rows(self._connection, sql.SQL(text).format(**parts))

    @contextmanager
    def _naming(self, version: ViewVersion, solution: str | None = None) -> Iterator[None]:
        """Name the view in an error of the server.

        :raises ViewRefused: in place of the server's error.
        """
        try:
            yield
        except (psycopg2.DataError, psycopg2.IntegrityError, psycopg2.InternalError, psycopg2.ProgrammingError) as e:
            raise ViewRefused.by(version.view.label, e.diag.message_primary or str(e), solution) from e

    def begin(self, version: ViewVersion) -> None:
        with self._naming(version):
            self._begin(version)
        failpoint("before-view-begun")

    def _begin(self, version: ViewVersion) -> None:
        view = version.view
        mark = hashlib.sha256(f"{self._pipeline} {version.number}".encode()).hexdigest()[:12]
        relation, queue = f"airflow_cdc_{mark}", f"queue_{mark}"
        schema = sql.Identifier(view.schema)
        if scalar(self._connection, "SELECT to_regnamespace(%s)", [schema.as_string(self._connection)]) is None:
            self._run("CREATE SCHEMA {schema}", schema=schema)
        table, anchor = sql.Identifier(view.schema, relation), [sql.Identifier(each.output) for each in view.anchor]
        self._run(
            f"CREATE TABLE {{table}} WITH ({ROOM_FOR_VIEWS}) AS {{select}} WITH NO DATA",
            table=table,
            select=self._rows(version).select,
        )
        if view.one_row and not view.grouped:
            self._run("ALTER TABLE {table} ADD PRIMARY KEY ({anchor})", table=table, anchor=listed(anchor))
        else:
            # A publication of all tables would refuse to update or delete rows without a replica identity.
            self._run(
                "CREATE INDEX ON {table} ({anchor}); ALTER TABLE {table} REPLICA IDENTITY FULL",
                table=table,
                anchor=listed(anchor),
            )
        self._run(
            "CREATE TABLE {queue} AS SELECT {anchor} FROM {table} WITH NO DATA",
            queue=sql.Identifier("airflow_cdc", queue),
            anchor=listed(sql.SQL(f"{{}} AS a{n}").format(each) for n, each in enumerate(anchor)),
            table=table,
        )
        root = self.targets[view.root.label]
        estimate = scalar(
            self._connection,
            "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = to_regclass(%s)",
            [sql.Identifier(root.schema, root.name).as_string(self._connection)],
        )
        self._change(version, relation=relation, queue=queue, anchors_expected=estimate)

    @contextmanager
    def _limited(self, count: int) -> Iterator[None]:
        """Give up statements that take longer than a unit can wait for, unless a portion cannot be smaller."""
        if count > 1:
            self._run("SET LOCAL statement_timeout = {time}", time=sql.Literal(_STEP_TIMEOUT))
        try:
            yield
        except psycopg2.errors.QueryCanceled as e:
            raise TooSlow from e

    def build(self, version: ViewVersion, count: int) -> None:
        with self._naming(version), self._limited(count):
            self._build(version, count)
        failpoint("before-view-built")

    def _build(self, version: ViewVersion, count: int) -> None:
        view_rows, root = self._rows(version), self.targets[version.view.root.label]
        anchor = view_rows.root_anchor("t")
        beyond = view_rows.without_nulls(anchor)
        if version.built is not None:
            bound = listed(view_rows.bound(version.built))
            beyond = sql.SQL("({} AND ({}) > ({}))").format(beyond, listed(anchor), bound)
        names = [sql.SQL(f"a{n}") for n in range(len(anchor))]
        named = listed(sql.SQL("{} AS {}").format(*pair) for pair in zip(anchor, names, strict=True))
        table = sql.Identifier(root.schema, root.name)
        last = self._run(
            "SELECT {texts}, count(*) OVER () FROM"
            " (SELECT {named} FROM {table} t WHERE {beyond} ORDER BY {anchor} LIMIT {count}) AS portion"
            " ORDER BY {down} LIMIT 1",
            texts=listed(sql.SQL("concat({})").format(name) for name in names),
            named=named,
            table=table,
            beyond=beyond,
            anchor=listed(anchor),
            count=sql.Literal(count),
            down=listed(sql.SQL("{} DESC").format(name) for name in names),
        )
        found = int(last[0][-1]) if last else 0
        built = tuple(map(str, last[0][:-1])) if last else version.built
        if found < count:  # the last range, with the anchors that have NULLs
            nulls = sql.SQL(" OR ").join(sql.SQL("{} IS NULL").format(each) for each in anchor)
            chosen = sql.SQL("{} OR {}").format(beyond, nulls)
        else:
            assert built is not None
            chosen = sql.SQL("{} AND ({}) <= ({})").format(beyond, listed(anchor), listed(view_rows.bound(built)))
        query = sql.SQL("SELECT {} FROM {} t WHERE {}").format(named, table, chosen)
        view_rows.find([query.as_string(self._connection)], unbuilt=True)
        view_rows.insert()
        self._change(
            version,
            built=None if built is None else list(built),
            anchors_built=version.anchors_built + found,
            complete=found < count,
        )

    def exchange(self, version: ViewVersion) -> None:
        view = version.view
        self._run("SET LOCAL lock_timeout = {time}", time=sql.Literal(_EXCHANGE_LOCK))
        built, final = sql.Identifier(view.schema, version.relation), sql.Identifier(view.schema, view.name)
        former = [each for each in self.versions() if each.view.label == view.label and each.number != version.number]
        if any(each.in_place for each in former):
            names = [built.as_string(self._connection), final.as_string(self._connection)]
            self._require_unprotected(version, names[1])
            for (grant,) in rows(self._connection, _GRANTS, names):
                rows(self._connection, grant)
            with self._naming(version, _DEPENDENTS):
                self._run("DROP TABLE IF EXISTS {final}", final=final)
        else:
            self.require_free(version.settings, former)
        self._run("ALTER TABLE {built} RENAME TO {name}", built=built, name=sql.Identifier(view.name))
        for each in former:
            remove_version(self._connection, self._pipeline, each)
        self._change(version, relation=view.name)
        failpoint("before-view-exchanged")

    def _require_unprotected(self, version: ViewVersion, table: str) -> None:
        """Refuse to replace a table with policies or triggers, which would go with it.

        :raises ViewRefused: when it has some.
        """
        if scalar(self._connection, _PROTECTED, [table]):
            raise ViewRefused.by(
                version.view.label,
                "its table has row-level security or triggers, which its new version would not have",
                "The new version is built. Drop the table, which the new version then replaces, and start again; create"
                " policies and triggers again afterwards.",
            )

    def drain(self, version: ViewVersion, count: int) -> bool:
        view_rows = self._rows(version)
        with self._limited(count):
            left = view_rows.take(count)
            view_rows.recompute()
        if not left:
            self._change(version, behind_lsn=None)
        failpoint("before-view-drained")
        return left

    # -- indexes -----------------------------------------------------------------------------------

    def lacking_indexes(self, view: View) -> Iterator[tuple[str, str]]:
        """Yield the statements that create missing indexes, with the statement to run before, if any."""
        for label, columns in view.looked_up:
            target = self.targets[label]
            table = sql.Identifier(target.schema, target.name)
            name = hashlib.sha256(f"{label} {columns}".encode()).hexdigest()[:12]
            index = sql.Identifier(f"airflow_cdc_{name}")
            found = rows(self._connection, _INDEXES, [table.as_string(self._connection), len(columns), list(columns)])
            if any(valid for _, valid in found):
                continue
            drop = sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}").format(sql.Identifier(target.schema, index.string))
            create = sql.SQL("CREATE INDEX CONCURRENTLY {} ON {} ({})").format(
                index, table, listed(map(sql.Identifier, columns))
            )
            yield drop.as_string(self._connection), create.as_string(self._connection)
