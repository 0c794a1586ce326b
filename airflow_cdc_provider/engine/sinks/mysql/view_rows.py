"""The rows of a view in MySQL: finds, recomputes and queues anchors, which are in temporary tables.

A statement cannot name a temporary table twice, so each way to the anchors is a statement, and tables are compared
pairwise. ``<=>`` treats NULL like other values and uses indexes. Conditions of joins and anchors are those of the
columns' collations, as in the SELECT; rows are compared exactly. Distinct anchors come from UNION, which compares
whole values, while sorting could compare only the beginning of long ones. The index on the anchor is forced, because
the server knows little about a table that has just been filled, and would read all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyarrow as pa

from airflow_cdc_provider.engine.core.errors import ViewRefused
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.mysql.address import driver
from airflow_cdc_provider.engine.sinks.mysql.bulk_load import Field, constant
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import VALUES, code_of, server_message
from airflow_cdc_provider.engine.sinks.mysql.types import column_types
from airflow_cdc_provider.engine.sinks.mysql.view_definition import anchor_index
from airflow_cdc_provider.engine.sinks.mysql.view_record import rows_table
from airflow_cdc_provider.engine.views.version import ViewVersion

# With an unknown column, a row that is too large for a page, and a result that GROUP_CONCAT has cut.
_REFUSALS = (*VALUES, 1054, 1118, 1260)


def same(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return the condition that values are exactly the same, also in case, spaces and the sign of zero."""
    pairs = zip(ours, theirs, strict=True)
    return " AND ".join(f"{a} <=> {b} AND CAST({a} AS BINARY) <=> CAST({b} AS BINARY)" for a, b in pairs)


def equal(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return the condition that two anchors are equal."""
    return " AND ".join(f"{a} <=> {b}" for a, b in zip(ours, theirs, strict=True))


@contextmanager
def naming(view: str) -> Iterator[None]:
    """Name the view in an error of the server.

    :raises ViewRefused: in place of the server's error.
    """
    pymysql = driver()
    try:
        yield
    except pymysql.MySQLError as e:
        refusals = (pymysql.err.DataError, pymysql.err.IntegrityError, pymysql.err.ProgrammingError)
        if not isinstance(e, refusals) and code_of(e) not in _REFUSALS:
            raise
        raise ViewRefused.by(view, server_message(e)) from e


class ViewRows:
    """The rows of one version of a view, in a transaction.

    :param targets: the recorded targets by label.
    """

    def __init__(self, session: Session, targets: Mapping[str, Target], version: ViewVersion) -> None:
        self._session = session
        self._version = version
        self._view = version.view
        self._root = targets[self._view.root.label]
        self.tables = {label: quoted(targets[label].schema, targets[label].name) for label in self._view.columns}
        self._relation = rows_table(version)
        self._index = f"FORCE INDEX ({anchor_index(self._view)})"
        self._queue_table = quoted("airflow_cdc", version.queue)
        kinds = column_types(self._root.table)
        self._fields = [Field(each.column, kinds[each.column]) for each in self._view.anchor]
        self._names = [f"a{n}" for n in range(len(self._view.anchor))]
        self._listed = ", ".join(self._names)
        self._columns = [quoted(output.name) for output in self._view.outputs]

    def _temporary(self, what: str) -> str:
        return quoted("airflow_cdc", f"cdc_{what}_{self._version.number}")

    def _create_anchors(self, what: str) -> str:
        """Create a temporary table of anchors."""
        table = self._temporary(what)
        self._session.run(f"CREATE TEMPORARY TABLE {table} LIKE {self._queue_table}")
        return table

    def _anchor(self, relation: str) -> list[str]:
        """Return the anchor of a row of the view."""
        return [f"{relation}.{quoted(each.output)}" for each in self._view.anchor]

    def _found_anchor(self, relation: str) -> list[str]:
        """Return the anchor of a row of a temporary table."""
        return [f"{relation}.{name}" for name in self._names]

    def root_anchor(self, relation: str) -> list[str]:
        """Return the anchor of a row of the root's table."""
        return [f"{relation}.{quoted(each.column)}" for each in self._view.anchor]

    @property
    def select(self) -> str:
        """Return the SELECT of all rows."""
        return self._view.select(self.tables)

    def texts(self, anchor: Sequence[str]) -> list[str]:
        """Return the texts of an anchor, for messages."""
        return [
            f"CONVERT({field.kind.read.format(each)} USING utf8mb4)"
            for field, each in zip(self._fields, anchor, strict=True)
        ]

    # -- finding -----------------------------------------------------------------------------------

    def find(self, queries: Sequence[str], unbuilt: bool = False) -> int:
        """Keep the distinct anchors of queries; return their number.

        :param unbuilt: whether to keep those whose rows are not built yet.
        """
        found, anchors = self._create_anchors("found"), self._create_anchors("anchors")
        for query in queries:
            self._session.run(f"INSERT INTO {found} ({self._listed}) {query}")
        built = "TRUE" if unbuilt else self.built(self._found_anchor("a"))
        return self._session.run(
            f"INSERT INTO {anchors} ({self._listed}) {self._distinct(f'FROM {found} a WHERE {built}', 'a')}"
        )

    def _distinct(self, source: str, relation: str) -> str:
        """Return the query of distinct anchors."""
        nothing = ", ".join("NULL" for _ in self._names)
        chosen = ", ".join(self._found_anchor(relation))
        return f"SELECT {chosen} {source} UNION SELECT {nothing} FROM DUAL WHERE 1 = 0"

    def built(self, anchor: Sequence[str]) -> str:
        """Return the condition that an anchor is in a range that has been built.

        Ranges are built in the order of the anchors, those with NULLs last.
        """
        if self._version.complete:
            return "TRUE"
        assert self._version.built is not None
        return f"{self.without_nulls(anchor)} AND {self.up_to(anchor, self._version.built)}"

    def without_nulls(self, anchor: Sequence[str]) -> str:
        """Return the condition that no column of an anchor is NULL."""
        return " AND ".join(f"{each} IS NOT NULL" for each in anchor)

    def up_to(self, anchor: Sequence[str], texts: Sequence[str]) -> str:
        """Return the condition that an anchor without NULLs is not beyond another, given by its texts."""
        bound = self._bound(texts)
        return f"{anchor[0]} <= {bound[0]} AND ({_compared(anchor, bound, '<')} OR {_all_equal(anchor, bound)})"

    def beyond(self, anchor: Sequence[str], texts: Sequence[str]) -> str:
        """Return the condition that an anchor without NULLs is beyond another, given by its texts."""
        bound = self._bound(texts)
        return f"{anchor[0]} >= {bound[0]} AND ({_compared(anchor, bound, '>')})"

    def _bound(self, texts: Sequence[str]) -> list[str]:
        return [constant(field, text, self._root.table.label) for field, text in zip(self._fields, texts, strict=True)]

    def last_of(self, beyond: str, count: int) -> tuple[int, tuple[str, ...] | None]:
        """Return the number of the root's next rows, at most ``count``, and the texts of the last anchor."""
        portion = self._temporary("portion")
        columns = [f"{each} AS a{n}" for n, each in enumerate(self.root_anchor("t"))]
        found = self._session.run(
            f"CREATE TEMPORARY TABLE {portion} AS SELECT {', '.join(columns)} FROM {self.tables[self._root_label]} t"
            f" WHERE {beyond} ORDER BY {', '.join(self.root_anchor('t'))} LIMIT {count}"
        )
        if not found:
            return 0, None
        shown = ", ".join(field.kind.read.format(name) for field, name in zip(self._fields, self._names, strict=True))
        down = ", ".join(f"{name} DESC" for name in self._names)
        ((row,),) = list(self._session.stream(f"SELECT {shown} FROM {portion} ORDER BY {down} LIMIT 1", 1))
        values = [value.decode() if isinstance(value, bytes) else str(value) for value in row]
        texts = (
            field.kind.decode(pa.array([value], pa.large_string()))[0].as_py()
            for field, value in zip(self._fields, values, strict=True)
        )
        return found, tuple(texts)

    @property
    def _root_label(self) -> str:
        return self._view.root.label

    def of_root(self, condition: str) -> str:
        """Return the query of the anchors of the root's rows ``t`` that match a condition."""
        return f"SELECT {', '.join(self.root_anchor('t'))} FROM {self.tables[self._root_label]} t WHERE {condition}"

    # -- the queue ---------------------------------------------------------------------------------

    def queue(self) -> None:
        """Put the found anchors into the queue."""
        self._session.run(
            f"INSERT INTO {self._queue_table} ({self._listed}) SELECT {self._listed} FROM {self._temporary('anchors')}"
        )

    def take(self, count: int) -> bool:
        """Take about ``count`` anchors from the queue; return whether some are left there."""
        first = f"SELECT id FROM {self._queue_table} ORDER BY id LIMIT {count}"
        (last,) = self._session.one(f"SELECT COALESCE(MAX(id), 0) FROM ({first}) AS taken")
        self.find([f"SELECT {self._listed} FROM {self._queue_table} WHERE id <= {last}"])
        self._session.run(f"DELETE FROM {self._queue_table} WHERE id <= {last}")
        return bool(self._session.rows(f"SELECT 1 FROM {self._queue_table} LIMIT 1"))

    # -- recomputing -------------------------------------------------------------------------------

    def insert(self) -> None:
        """Compute the rows of the found anchors, of which the view has none yet, and add them.

        :raises ViewRefused: as :meth:`recompute`.
        """
        with naming(self._view.label):
            self._insert_into(self._relation)

    def recompute(self) -> int:
        """Compute the rows of the found anchors, and write the differences to the view; return their number.

        :raises ViewRefused: when the server cannot compute or write them.
        """
        with naming(self._view.label):
            return self._recompute()

    def _insert_into(self, table: str) -> None:
        restriction = equal(self._found_anchor("cdc_anchor"), self.root_anchor(self._view.quote(self._view.root.name)))
        select = self._view.select(self.tables, (f"{self._temporary('anchors')} AS cdc_anchor", restriction))
        self._session.run(f"INSERT INTO {table} ({', '.join(self._columns)}) {select}")

    def _recompute(self) -> int:
        fresh, anchors = self._temporary("fresh"), self._temporary("anchors")
        self._session.run(f"CREATE TEMPORARY TABLE {fresh} LIKE {self._relation}")
        self._insert_into(fresh)
        write = self._write_single if self._view.one_row else self._write_several
        return write(fresh, anchors)

    def _of(self, relation: str) -> list[str]:
        """Return the columns of a row of the view."""
        return [f"{relation}.{column}" for column in self._columns]

    def _write_single(self, fresh: str, anchors: str) -> int:
        """Write the differences of a view with at most one row for an anchor."""
        view, names = self._relation, ", ".join(self._columns)
        stored, wanted = self._of("v"), self._of("f")
        match = equal(self._anchor("v"), self._anchor("f"))
        values = ", ".join(f"{a} = {b}" for a, b in zip(stored, wanted, strict=True))
        changed = self._session.run(
            f"UPDATE {fresh} f STRAIGHT_JOIN {view} v {self._index} ON {match} SET {values}"
            f" WHERE NOT ({same(stored, wanted)})"
        )
        found = self._found_anchor("a")
        gone = self._session.run(  # for an alias, the server would need the name of the database
            f"DELETE {view} FROM {anchors} a STRAIGHT_JOIN {view} {self._index} ON {equal(self._anchor(view), found)}"
            f" WHERE NOT EXISTS (SELECT 1 FROM {fresh} f {self._index} WHERE {equal(self._anchor('f'), found)})"
        )
        added = self._session.run(
            f"INSERT INTO {view} ({names}) SELECT {', '.join(wanted)} FROM {fresh} f"
            f" WHERE NOT EXISTS (SELECT 1 FROM {view} v {self._index} WHERE {match})"
        )
        return changed + gone + added

    def _write_several(self, fresh: str, anchors: str) -> int:
        """Write all rows of the anchors whose rows differ; rows of an anchor may be equal, so they are counted."""
        view, names = self._relation, ", ".join(self._columns)
        sides, differing = self._temporary("sides"), self._temporary("differing")
        found, of_view, of_fresh = self._found_anchor("a"), self._anchor("v"), self._anchor("f")
        self._session.run(
            f"CREATE TEMPORARY TABLE {sides} (KEY (hash)) AS SELECT {', '.join(found)}, 1 AS side,"
            f" {hash_of(self._of('v'))} AS hash FROM {anchors} a STRAIGHT_JOIN {view} v {self._index}"
            f" ON {equal(of_view, found)}"
        )
        self._session.run(
            f"INSERT INTO {sides} ({self._listed}, side, hash)"
            f" SELECT {', '.join(of_fresh)}, -1, {hash_of(self._of('f'))} FROM {fresh} f"
        )
        self._session.run(
            f"CREATE TEMPORARY TABLE {differing} AS SELECT hash FROM {sides} GROUP BY hash HAVING SUM(side) <> 0"
        )
        touched = self._create_anchors("touched")
        source = f"FROM {differing} d STRAIGHT_JOIN {sides} s ON s.hash = d.hash"
        self._session.run(f"INSERT INTO {touched} ({self._listed}) {self._distinct(source, 's')}")
        chosen = self._found_anchor("t")
        gone = self._session.run(
            f"DELETE {view} FROM {touched} t STRAIGHT_JOIN {view} {self._index} ON {equal(self._anchor(view), chosen)}"
        )
        added = self._session.run(
            f"INSERT INTO {view} ({names}) SELECT {', '.join(self._of('f'))} FROM {touched} t"
            f" STRAIGHT_JOIN {fresh} f {self._index} ON {equal(of_fresh, chosen)}"
        )
        return gone + added


def _all_equal(ours: Sequence[str], theirs: Sequence[str]) -> str:
    return " AND ".join(f"{a} = {b}" for a, b in zip(ours, theirs, strict=True))


def _compared(ours: Sequence[str], theirs: Sequence[str], sign: str) -> str:
    """Return the condition that one list comes before (``<``) or after (``>``) another; indexes serve its parts."""
    parts = []
    for n in range(len(ours)):
        before = [f"{a} = {b}" for a, b in zip(ours[:n], theirs[:n], strict=True)]
        parts.append(" AND ".join([*before, f"{ours[n]} {sign} {theirs[n]}"]))
    return " OR ".join(f"({part})" for part in parts)


def hash_of(values: Sequence[str]) -> str:
    """Return a hash of a row, which is the same for exactly the same rows."""
    parts = ", ".join(f"IFNULL(SHA2(CAST({value} AS BINARY), 256), '-')" for value in values)
    return f"SHA2(CONCAT_WS(',', {parts}), 256)"
