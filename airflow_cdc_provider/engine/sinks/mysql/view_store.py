"""The versions of a pipeline's views in MySQL, and the steps that build them; see :mod:`.transactional.view_store`.

Steps that create or rename tables hold the named lock, because DDL commits:

* The tables of a version have names that follow from its number. A step that a crash has interrupted drops them and
  begins again.
* An exchange is announced, then made by one RENAME, then recorded. Units wait for the record while it is announced. If
  the table of the new rows is still there under its own name, the RENAME has not happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from airflow_cdc_provider.engine.core.errors import ForeignTable, TargetConflict
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.mysql.address import driver
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import is_retryable, server_message
from airflow_cdc_provider.engine.sinks.mysql.table_definition import VIEW_INDEX
from airflow_cdc_provider.engine.sinks.mysql.view_definition import (
    create_queue,
    create_rows,
    key_prefix,
    probed,
    quoted_tables,
)
from airflow_cdc_provider.engine.sinks.mysql.view_record import (
    add_version,
    announce_exchange,
    change_settings,
    change_version,
    end_version,
    finish_exchange,
    has_views,
    read_versions,
    rows_table,
    table_names,
)
from airflow_cdc_provider.engine.sinks.mysql.view_rows import ViewRows, naming
from airflow_cdc_provider.engine.sinks.transactional.view_store import ViewStore
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion

# Readers of a view wait behind a lock that waits for readers, so it must not wait for long.
_EXCHANGE_SECONDS = 2.0


def analyze(session: Session, table: str) -> None:
    """Let the server count what a table has, without which it may not use an index; this ends a transaction."""
    session.rows(f"ANALYZE NO_WRITE_TO_BINLOG TABLE {table}")


class MysqlViewStore(ViewStore):
    """The versions of views, in a transaction of a MySQL sink.

    :param applied: the applied LSN.
    :param alone: ends the transaction, and begins another one under the named lock, which lasts for the block.
    :param awaits: token of an announced alteration; changes of versions wait until it is made.
    """

    def __init__(
        self,
        session: Session,
        pipeline: str,
        views: Sequence[ViewSettings],
        targets: Mapping[str, Target],
        applied: LogPosition,
        alone: Callable[[], AbstractContextManager[None]],
        awaits: str = "",
    ) -> None:
        super().__init__(views, targets)
        self._session = session
        self._pipeline = pipeline
        self._applied = applied
        self._alone = alone
        self._awaits = awaits

    def versions(self) -> list[ViewVersion]:
        return read_versions(self._session, self._pipeline) if has_views(self._session) else []

    def parse(self, settings: ViewSettings, tables: Mapping[str, Table]) -> View:
        from airflow_cdc_provider.engine.views.select_parser import parse_view  # late: executors do not need sqlglot

        return parse_view(settings, tables, "mysql")

    def checked(self, settings: ViewSettings) -> View:
        from airflow_cdc_provider.engine.sinks.mysql.view_checks import checked_view  # late, as above

        return checked_view(self._session, settings, self.targets)

    def exists(self, version: ViewVersion) -> bool:
        schema = version.view.schema if version.in_place else "airflow_cdc"
        return self._session.exists(schema, version.relation)

    def taken(self, settings: ViewSettings) -> bool:
        return self._session.exists(settings.schema, settings.name)

    def create_record(self) -> None:
        """Do nothing: :meth:`.MysqlViews.view_store` has created it, because that ends a transaction."""

    def add(self, settings: ViewSettings, view: View) -> None:
        add_version(self._session, self._pipeline, settings, view, self._awaits)

    def resettle(self, version: ViewVersion, settings: ViewSettings) -> None:
        change_settings(self._session, self._pipeline, version.number, settings)

    def end(self, version: ViewVersion) -> None:
        if not self._awaits:
            end_version(self._session, self._pipeline, version, self._applied)

    def is_consistent(self) -> bool:
        return not self._session.rows(
            "SELECT 1 FROM airflow_cdc.chunks c JOIN airflow_cdc.pipelines p ON p.pipeline = c.pipeline"
            " WHERE c.pipeline = %s AND (c.high_lsn IS NULL OR c.high_lsn > p.applied_lsn) LIMIT 1",
            [self._pipeline],
        )

    def _change(self, version: ViewVersion, **values: Any) -> None:
        change_version(self._session, self._pipeline, version.number, **values)

    def _rows(self, version: ViewVersion) -> ViewRows:
        return ViewRows(self._session, self.targets, version)

    # -- steps with DDL ----------------------------------------------------------------------------

    def begin(self, version: ViewVersion) -> None:
        with self._alone():
            if version not in self.versions():
                return  # it has changed before the named lock was there
            view, root = version.view, self.targets[version.view.root.label]
            relation, queue = table_names(self._pipeline, version.number)
            select = view.select(quoted_tables(self.targets))
            with naming(view.label), probed(self._session, select) as columns:
                statements = [
                    create_rows(view, columns, relation, self._pipeline),
                    create_queue(view, columns, queue, self._pipeline),
                ]
            for name in (relation, queue):
                self._session.run(f"DROP TABLE IF EXISTS {quoted('airflow_cdc', name)}")
            for statement in statements:
                self._session.run(statement)
            (estimate,) = self._session.one(
                "SELECT COALESCE(MAX(table_rows), 0) FROM information_schema.tables"
                " WHERE table_schema = %s AND table_name = %s",
                [root.schema, root.name],
            )
            self._change(version, relation=relation, queue=queue, anchors_expected=int(estimate))
            failpoint("before-view-begun")

    def exchange(self, version: ViewVersion) -> None:
        view = version.view
        with self._alone():
            versions = self.versions()
            if version not in versions:
                return
            former = [each for each in versions if each.view.label == view.label and each.in_place]
            moves = [f"{quoted('airflow_cdc', version.relation)} TO {quoted(view.schema, view.name)}"]
            if self._session.exists(view.schema, view.name):
                if not former:
                    raise ForeignTable(
                        f"view {view.label}: the sink has a table of this name that is not the pipeline's",
                        "Drop or rename the table, or give the view another name.",
                    )
                aside = table_names(self._pipeline, former[0].number)[0]
                moves.insert(0, f"{quoted(view.schema, view.name)} TO {quoted('airflow_cdc', aside)}")
            announce_exchange(self._session, self._pipeline, version)
            self._session.commit()
            self._rename(version, moves)

    def _rename(self, version: ViewVersion, moves: Sequence[str]) -> None:
        failpoint("before-exchange")
        pymysql = driver()
        analyze(self._session, rows_table(version))
        self._session.limit_waiting(_EXCHANGE_SECONDS)
        try:
            self._session.require_database(version.view.schema)
            self._session.run(f"RENAME TABLE {', '.join(moves)}")
        except pymysql.MySQLError as e:
            finish_exchange(self._session, self._pipeline, version.number)
            if is_retryable(e):
                raise
            raise TargetConflict(
                f"view {version.view.label}: its table cannot be replaced: {server_message(e)}",
                "Drop the obstacle (a trigger on the table, or a foreign key), then start again.",
            ) from e
        failpoint("before-view-exchanged")
        finish_exchange(self._session, self._pipeline, version.number)

    # -- steps without -----------------------------------------------------------------------------

    def build(self, version: ViewVersion, count: int) -> None:
        view_rows = self._rows(version)
        anchor = view_rows.root_anchor("t")
        beyond = view_rows.without_nulls(anchor)
        if version.built is not None:
            beyond = f"{beyond} AND {view_rows.beyond(anchor, version.built)}"
        found, last = view_rows.last_of(beyond, count)
        built = version.built if last is None else last
        if found < count:  # the last range, with the anchors that have NULLs
            ranges = [beyond, *([f"NOT ({view_rows.without_nulls(anchor)})"] if version.view.grouped else [])]
        else:
            assert built is not None
            ranges = [f"{beyond} AND {view_rows.up_to(anchor, built)}"]
        view_rows.find([view_rows.of_root(condition) for condition in ranges], unbuilt=True)
        view_rows.insert()
        self._change(
            version,
            built=None if built is None else list(built),
            anchors_built=version.anchors_built + found,
            complete=found < count,
        )
        failpoint("before-view-built")

    def drain(self, version: ViewVersion, count: int) -> bool:
        view_rows = self._rows(version)
        left = view_rows.take(count)
        view_rows.recompute()
        if not left:
            self._change(version, behind_lsn=None)
        failpoint("before-view-drained")
        return left

    # -- indexes -----------------------------------------------------------------------------------

    def lacking_indexes(self, view: View) -> Iterator[str]:
        """Yield the statements that create missing indexes."""
        for label, columns in view.looked_up:
            target = self.targets[label]
            where = [target.schema, target.name]
            found = self._session.rows(
                "SELECT index_name, column_name FROM information_schema.statistics"
                " WHERE table_schema = %s AND table_name = %s ORDER BY index_name, seq_in_index",
                where,
            )
            indexes: dict[str, list[str]] = {}
            for name, column in found:
                indexes.setdefault(str(name), []).append(str(column))
            if any(set(each[: len(columns)]) == set(columns) for each in indexes.values()):
                continue
            types = dict(
                self._session.rows(
                    "SELECT column_name, column_type FROM information_schema.columns"
                    " WHERE table_schema = %s AND table_name = %s",
                    where,
                )
            )
            mark = hashlib.sha256(f"{label} {columns}".encode()).hexdigest()[:12]
            name, table = f"{VIEW_INDEX}{mark}", quoted(target.schema, target.name)
            parts = [f"{quoted(column)}{key_prefix(str(types[column]), len(columns))}" for column in columns]
            yield f"CREATE INDEX {quoted(name)} ON {table} ({', '.join(parts)})"
