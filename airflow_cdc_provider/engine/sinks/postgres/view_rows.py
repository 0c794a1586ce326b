"""The rows of a view in Postgres: finds, recomputes and queues anchors, which are in a temporary table.

Anchors of GROUP BY may be NULL, which is then a value like others. A condition such as ``a IS NOT DISTINCT FROM b``
could use no index, so statements are repeated for each combination of NULLs among the anchors; there is rarely more
than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ViewRefused
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.views.version import ViewVersion

_GONE = "DELETE FROM {view} v USING {anchors} a WHERE {hit} AND NOT EXISTS (SELECT FROM fresh f WHERE {kept})"
Nulls = tuple[bool, ...]
"""For each column of an anchor, whether it is NULL."""


def listed(parts: Iterable[sql.Composable]) -> sql.Composable:
    """Return parts with commas between them."""
    return sql.SQL(", ").join(parts)


def match(ours: Sequence[sql.Composable], theirs: Sequence[sql.Composable], nulls: Nulls) -> sql.Composable:
    """Return the condition that two anchors with the given NULLs are equal."""
    pairs = zip(ours, theirs, nulls, strict=True)
    return sql.SQL(" AND ").join(
        sql.SQL("{} IS NULL AND {} IS NULL").format(our, their) if null else sql.SQL("{} = {}").format(our, their)
        for our, their, null in pairs
    )


class ViewRows:
    """The rows of one version of a view, in a transaction.

    :param targets: the recorded targets by label.
    """

    def __init__(self, connection: Connection, targets: Mapping[str, Target], version: ViewVersion) -> None:
        self._connection = connection
        self._version = version
        self._view = version.view
        self._root = targets[self._view.root.label]
        self.tables = {
            label: sql.Identifier(targets[label].schema, targets[label].name).as_string(connection)
            for label in self._view.columns
        }
        self._anchors = sql.Identifier("pg_temp", f"cdc_anchors_{version.number}")
        self.relation = sql.Identifier(self._view.schema, version.relation)
        self._queue_table = sql.Identifier("airflow_cdc", version.queue)

    def _run(self, text: str, **parts: sql.Composable) -> list[tuple[object, ...]]:
        common = {"anchors": self._anchors, "view": self.relation, "queue": self._queue_table}
        return rows(self._connection, sql.SQL(text).format(**common, **parts))

    @property
    def select(self) -> sql.Composable:
        """Return the SELECT of all rows."""
        return sql.SQL(self._view.select(self.tables))

    def _anchor(self, relation: str, outputs: bool = False) -> list[sql.Composable]:
        """Return the anchor of a row in ``anchors`` or, with ``outputs``, in the view."""
        names = [each.output for each in self._view.anchor] if outputs else None
        width = range(len(self._view.anchor))
        return [sql.SQL(f"{relation}.{{}}").format(sql.Identifier(names[n] if names else f"a{n}")) for n in width]

    def root_anchor(self, relation: str) -> list[sql.Composable]:
        """Return the anchor of a row of the root's table, under an alias."""
        return [
            sql.SQL("{}.{}").format(sql.Identifier(relation), sql.Identifier(each.column)) for each in self._view.anchor
        ]

    # -- finding -----------------------------------------------------------------------------------

    def find(self, queries: Sequence[str], unbuilt: bool = False) -> int:
        """Keep the distinct anchors of some queries; return their number.

        :param unbuilt: whether to keep those whose rows are not built yet.
        """
        self._run(
            "CREATE TEMPORARY TABLE {anchors} ON COMMIT DROP AS SELECT DISTINCT * FROM ({query}) a WHERE {built}"
            " ORDER BY {anchor}",
            query=sql.SQL(" UNION ALL ".join(queries)),
            anchor=listed(self._anchor("a")),
            built=sql.SQL("true") if unbuilt else self.built(self._anchor("a")),
        )
        count = int(str(self._run("SELECT count(*) FROM {anchors}")[0][0]))
        if count:
            self._run("ANALYZE {anchors}")
        return count

    def built(self, anchor: Sequence[sql.Composable]) -> sql.Composable:
        """Return the condition that an anchor is in a range that has been built.

        Ranges are built in the order of the anchors, those with NULLs last.
        """
        if self._version.complete:
            return sql.SQL("true")
        assert self._version.built is not None
        return sql.SQL("({} AND ({}) <= ({}))").format(
            self.without_nulls(anchor), listed(anchor), listed(self.bound(self._version.built))
        )

    def without_nulls(self, anchor: Sequence[sql.Composable]) -> sql.Composable:
        """Return the condition that no column of an anchor is NULL."""
        return sql.SQL(" AND ").join(sql.SQL("{} IS NOT NULL").format(each) for each in anchor)

    def bound(self, texts: Sequence[str]) -> list[sql.Composable]:
        """Return the anchor that texts denote, with the types of the root's table."""
        query = (
            "SELECT attname::text, format_type(atttypid, -1) FROM pg_attribute"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        table = sql.Identifier(self._root.schema, self._root.name).as_string(self._connection)
        types = dict(rows(self._connection, query, [table]))
        return [
            sql.SQL("{}::{}").format(sql.Literal(text), sql.SQL(types[each.column]))
            for text, each in zip(texts, self._view.anchor, strict=True)
        ]

    # -- the queue ---------------------------------------------------------------------------------

    def queue(self) -> None:
        """Put the found anchors into the queue."""
        self._run("INSERT INTO {queue} SELECT * FROM {anchors}")

    def take(self, count: int) -> bool:
        """Take about ``count`` anchors from the queue; return whether some are left there."""
        columns = listed(sql.SQL(f"a{n}") for n in range(len(self._view.anchor)))
        self._run(
            "CREATE TEMPORARY TABLE taken ON COMMIT DROP AS SELECT {columns} FROM {queue} WITH NO DATA;"
            "WITH gone AS (DELETE FROM {queue} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {queue} LIMIT {count}))"
            " RETURNING {columns}) INSERT INTO taken SELECT * FROM gone",
            columns=columns,
            count=sql.Literal(count),
        )
        left = bool(scalar(self._connection, sql.SQL("SELECT EXISTS (SELECT FROM {})").format(self._queue_table)))
        if not left:
            self._clear_queue()
        self.find(["SELECT * FROM taken"])
        return left

    def _clear_queue(self) -> None:
        """Remove what deleted rows leave in the empty queue, which every later look would pass, unless it is read."""
        self._run("SAVEPOINT cdc_queue")
        try:
            self._run("LOCK TABLE {queue} IN ACCESS EXCLUSIVE MODE NOWAIT")
            self._run("TRUNCATE {queue}")
        except psycopg2.errors.LockNotAvailable:
            self._run("ROLLBACK TO SAVEPOINT cdc_queue")

    # -- recomputing -------------------------------------------------------------------------------

    def recompute(self) -> int:
        """Compute the rows of the found anchors, and write the differences to the view; return their number.

        :raises ViewRefused: when the server cannot compute or write them.
        """
        try:
            return self._recompute()
        except psycopg2.errors.UndefinedTable as e:
            again = "Start again: a view whose table has been dropped is built again."
            raise ViewRefused.by(self._view.label, e.diag.message_primary or str(e), again) from e
        except (psycopg2.DataError, psycopg2.IntegrityError, psycopg2.ProgrammingError) as e:
            raise ViewRefused.by(self._view.label, e.diag.message_primary or str(e)) from e

    def _recompute(self) -> int:
        write = self._write_single
        if self._view.grouped:
            write = self._write_groups
        elif not self._view.one_row:
            write = self._write_several
        return sum(write(nulls) for nulls in list(self._patterns()))

    def insert(self) -> None:
        """Compute the rows of the found anchors, of which the view has none yet, and add them."""
        for nulls in list(self._patterns()):
            self._run("INSERT INTO {view} {select}", select=self._select_anchors(nulls))

    def _select_anchors(self, nulls: Nulls) -> sql.Composable:
        """Return the SELECT of the rows of the found anchors that have the given NULLs."""
        root = self.root_anchor(self._view.root.name)
        restriction = sql.SQL("{} AS cdc_anchor").format(self._anchors), match(self._anchor("cdc_anchor"), root, nulls)
        relation, condition = (part.as_string(self._connection) for part in restriction)
        return sql.SQL(self._view.select(self.tables, (relation, condition)))

    def _patterns(self) -> Iterator[Nulls]:
        """Yield the combinations of NULLs among the anchors."""
        if not self._view.grouped:  # the anchor is a key
            yield (False,) * len(self._view.anchor)
            return
        columns = listed(sql.SQL("{} IS NULL").format(each) for each in self._anchor("a"))
        for found in self._run("SELECT DISTINCT {columns} FROM {anchors} a", columns=columns):
            yield tuple(bool(null) for null in found)

    def _names(self, relation: str = "") -> sql.Composable:
        """Return the columns of the view, of a relation."""
        prefix = f"{relation}." if relation else ""
        return listed(sql.SQL(f"{prefix}{{}}").format(sql.Identifier(output.name)) for output in self._view.outputs)

    def _write(self, nulls: Nulls, texts: Mapping[str, str], **parts: sql.Composable) -> int:
        """Run queries with the fresh rows of the anchors, all of which see the view as it was before.

        :param texts: the queries by name; what begins with INSERT, UPDATE or DELETE is counted.
        :returns: the number of written rows.
        """
        view, fresh, anchors = self._anchor("v", outputs=True), self._anchor("f", outputs=True), self._anchor("a")
        writing = [name for name, text in texts.items() if not text.startswith("SELECT")]
        queries = [f"{name} AS ({text}{' RETURNING 1' if name in writing else ''})" for name, text in texts.items()]
        counts = " + ".join(f"(SELECT count(*) FROM {name})" for name in writing)
        found = self._run(
            f"WITH fresh AS MATERIALIZED ({{select}}), {', '.join(queries)} SELECT {counts}",
            select=self._select_anchors(nulls),
            names=self._names(),
            values=self._names("f"),
            stored=self._names("v"),
            same=match(view, fresh, nulls),
            hit=match(view, anchors, nulls),
            kept=match(fresh, anchors, nulls),
            **parts,
        )
        return int(str(found[0][0]))

    def _write_single(self, nulls: Nulls) -> int:
        """Write the differences of a view with at most one row for an anchor, which is its primary key."""
        return self._write(
            nulls,
            {
                "written": "INSERT INTO {view} AS v ({names}) SELECT {values} FROM fresh f ON CONFLICT ({key})"
                " DO UPDATE SET ({names}) = ROW({excluded}) WHERE NOT ROW({stored})::record *= ROW({excluded})::record",
                "gone": _GONE,
            },
            key=listed(sql.Identifier(each.output) for each in self._view.anchor),
            excluded=self._names("excluded"),
        )

    def _write_groups(self, nulls: Nulls) -> int:
        """Write the differences of a view with GROUP BY; no unique index could hold NULLs of groups apart."""
        return self._write(
            nulls,
            {
                "changed": "UPDATE {view} v SET ({names}) = ROW({values}) FROM fresh f"
                " WHERE {same} AND NOT ROW({stored})::record *= ROW({values})::record",
                "added": "INSERT INTO {view} ({names}) SELECT {values} FROM fresh f"
                " WHERE NOT EXISTS (SELECT FROM {view} v WHERE {same})",
                "gone": _GONE,
            },
        )

    def _write_several(self, nulls: Nulls) -> int:
        """Write the differences of a view with several rows for an anchor, which may be equal; texts identify them."""
        return self._write(
            nulls,
            {
                "have": "SELECT v.ctid AS place, ROW({stored})::text AS cdc_text,"
                " row_number() OVER (PARTITION BY ROW({stored})::text) AS cdc_copy"
                " FROM {view} v JOIN {anchors} a ON {hit}",
                "want": "SELECT f.*, ROW({values})::text AS cdc_text,"
                " row_number() OVER (PARTITION BY ROW({values})::text) AS cdc_copy FROM fresh f",
                "added": "INSERT INTO {view} ({names}) SELECT {values} FROM want f"
                " WHERE NOT EXISTS (SELECT FROM have h WHERE h.cdc_text = f.cdc_text AND h.cdc_copy = f.cdc_copy)",
                "gone": "DELETE FROM {view} v USING have h WHERE v.ctid = h.place"
                " AND NOT EXISTS (SELECT FROM want f WHERE h.cdc_text = f.cdc_text AND h.cdc_copy = f.cdc_copy)",
            },
        )
