"""Computes the rows of a view with Spark, at versions of the mirror's tables, and writes them in one commit.

A view at one moment is brought to a later one like this. Of each table, the rows whose columns differ between the two
versions are compared as bags, in the files that differ. From these rows, old and new ones, the joins lead to the
anchors, over the tables at the later version; :mod:`..transactional.view_upkeep` explains why these suffice. The rows
of the anchors are computed, and a MERGE writes those that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.delta.delta_table import number_next_write
from airflow_cdc_provider.engine.sinks.delta.spark_errors import retry_on_conflict
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout, location, quoted
from airflow_cdc_provider.engine.sinks.delta.table_versions import TableVersions, VersionGone
from airflow_cdc_provider.engine.sinks.delta.view_check import empty_relation, table_exists
from airflow_cdc_provider.engine.sinks.delta.view_record import Moment, Pin
from airflow_cdc_provider.engine.views.definition import View

_ANCHORS = "cdc_anchors"
_FLOATS = ("float", "double")


class ViewRows:
    """The rows of a view.

    :param spark: a session that is used for nothing else.
    :param targets: the recorded targets by label.
    """

    def __init__(self, spark: SparkSession, layout: Layout, targets: Mapping[str, Target], view: View) -> None:
        self._spark = spark
        self._layout = layout
        self._targets = targets
        self._view = view
        self._opened: dict[str, TableVersions] = {}
        self._relations = {label: f"cdc_table_{n}" for n, label in enumerate(view.columns)}
        self._outputs = [output.name for output in view.outputs]
        self._columns = [f"o{n}" for n in range(len(self._outputs))]
        self._anchor = [each.output for each in view.anchor]

    # -- computing ----------------------------------------------------------------------------------

    def at(self, moment: Moment) -> DataFrame:
        """Return all rows at a moment.

        :raises VersionGone: when a version of a table is gone.
        """
        self._read(moment, TableVersions.rows)
        return self._spark.sql(self._view.select(self._relations))

    def _versions(self, label: str) -> TableVersions:
        if label not in self._opened:
            self._opened[label] = TableVersions(self._spark, self._layout, self._targets[label])
        return self._opened[label]

    def _read(self, moment: Moment, rows_of: Callable[[TableVersions, Pin], DataFrame]) -> None:
        """Let the relations be the tables at a moment."""
        for label, columns in self._view.columns.items():
            pin, target = moment.pins[label], self._targets.get(label)
            if pin is not None and target is not None:
                rows = rows_of(self._versions(label), pin).select(*map(quoted, columns))
            elif target is not None and {*columns} <= {column.name for column in target.table.columns}:
                rows = empty_relation(self._spark, target, columns)
            else:
                raise VersionGone(f"{label} no longer has the columns that the view reads")
            rows.createOrReplaceTempView(self._relations[label])

    def anchors(self, before: Moment, after: Moment) -> DataFrame | None:
        """Return the anchors that changes between two moments affect, ``a0`` …; ``None`` if no rows have changed.

        :raises VersionGone: as :meth:`at`.
        """
        self._read(after, TableVersions.listed_rows)
        changed = {}
        for n, label in enumerate(self._view.columns):
            rows = self._changes(label, before, after)
            if rows is not None and self._joined(label):
                rows, count = _kept(rows)  # whether there are any, before other tables are read as a whole
                rows = rows if count else None
            if rows is not None:
                changed[label] = f"cdc_changes_{n}"
                rows.createOrReplaceTempView(changed[label])
        walks = self._view.walks(changed, self._relations)
        return self._spark.sql(" UNION ALL ".join(walks)).distinct() if walks else None

    def _changes(self, label: str, before: Moment, after: Moment) -> DataFrame | None:
        """Return the old and new values of rows whose columns differ, ``r0`` … in the order of the view's columns.

        :returns: ``None`` if no files differ.
        """
        columns = self._view.columns[label]
        old, new = before.pins.get(label), after.pins[label]
        if old == new:
            return None
        if new is None:
            raise VersionGone(f"the table of {label} is gone")
        if old is None:
            return self._numbered(self._spark.table(self._relations[label]), columns)
        sides = self._versions(label).differing(old, new)
        if sides is None:
            return None
        removed, added = (self._numbered(rows, columns) for rows in sides)
        return bags(removed, added).where("ours <> theirs").drop("ours", "theirs")

    def _joined(self, label: str) -> bool:
        """Return whether joins lead from a table to the anchor."""
        return any(alias.parent for alias in self._view.aliases if alias.label == label)

    @staticmethod
    def _numbered(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
        return rows.select(*(f.col(quoted(name)).alias(f"r{n}") for n, name in enumerate(columns)))

    # -- writing ------------------------------------------------------------------------------------

    def build(self, moment: Moment, application: str) -> None:
        """Replace all rows, and the columns, by those at a moment.

        :param application: the application under which the table records the moment's number.
        :raises VersionGone: as :meth:`at`.
        """
        rows, name = self.at(moment), self._layout.sql_name(self._view)
        exists = table_exists(lambda: self._spark, self._layout, self._view)
        if exists and any("timestamp_ntz" in kind for _, kind in rows.dtypes):
            self._spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('delta.feature.timestampNtz' = 'supported')")
        if self._layout.catalog is not None:
            schema = f"{quoted(self._layout.catalog)}.{quoted(self._view.schema)}"
            self._spark.sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")

        failpoint("before-view-written")

        def write() -> None:
            number_next_write(self._spark, application, moment.number)
            writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
            for option, value in () if exists else self._layout.properties:
                writer = writer.option(option, value)
            if self._layout.catalog is None:
                writer.save(location(self._layout.place(self._view)))
            else:
                writer.saveAsTable(name)

        retry_on_conflict(write)

    def move(self, before: Moment, after: Moment, application: str) -> int:
        """Bring the rows from one moment to another in one commit; return the number of affected anchors.

        :raises VersionGone: as :meth:`at`.
        """
        found = self.anchors(before, after)
        if found is None:
            return 0
        anchors, count = _kept(found)
        failpoint("before-view-written")
        differences = self._differences(anchors) if count else None
        if differences is not None:
            self._merge(differences, after.number, application)
        return count

    def _differences(self, anchors: DataFrame) -> DataFrame | None:
        """Return the rows of anchors of which the table has a wrong number of copies.

        :returns: the rows, ``o0`` …, as :func:`bags` has them; ``ours`` is what the table should have, ``theirs`` what
            it has. ``None`` if no rows differ.
        """
        anchors.createOrReplaceTempView(_ANCHORS)
        root = quoted(self._view.root.name)
        equal = " AND ".join(
            f"{root}.{quoted(each.column)} <=> {_ANCHORS}.a{n}" for n, each in enumerate(self._view.anchor)
        )
        select = self._view.select(self._relations, (_ANCHORS, equal))
        wanted = self._spark.sql(select).toDF(*self._columns)
        own = " AND ".join(f"v.{quoted(name)} <=> a.a{n}" for n, name in enumerate(self._anchor))
        table = TableVersions(self._spark, self._layout, self._view)
        stored = table.listed_rows(table.current()).alias("v").join(anchors.alias("a"), f.expr(own), "left_semi")
        stored = stored.select(*map(quoted, self._outputs)).toDF(*self._columns)
        different, count = _kept(bags(wanted, stored).where("ours <> theirs"))
        return different if count else None

    def _merge(self, different: DataFrame, number: int, application: str) -> None:
        """Write the differences in one commit.

        The source has a row for each different row that the table has, which matches its copies, to delete them, and
        the copies that the table should have, which match none.
        """
        gone = different.where("theirs > 0").select(*self._columns, f.lit(True).alias("gone"))
        copies = f.explode(f.expr("array_repeat(0, int(ours))")).alias("copy")
        new = different.select(*self._columns, f.lit(False).alias("gone"), copies).drop("copy")
        gone.union(new).createOrReplaceTempView("cdc_source")
        pairs = zip(self._outputs, different.dtypes, strict=False)
        identity = self._anchor if self._view.one_row else self._outputs  # few columns if they suffice, to be fast
        match = " AND ".join(
            f"{_exact(f't.{quoted(name)}', kind)} <=> {_exact(f's.{column}', kind)}"
            for name, (column, kind) in pairs
            if name in identity
        )
        names, values = ", ".join(map(quoted, self._outputs)), ", ".join(f"s.{column}" for column in self._columns)

        def write() -> None:
            number_next_write(self._spark, application, number)
            self._spark.sql(
                f"MERGE INTO {self._layout.sql_name(self._view)} t USING cdc_source s ON s.gone AND {match}"
                " WHEN MATCHED THEN DELETE"
                f" WHEN NOT MATCHED AND NOT s.gone THEN INSERT ({names}) VALUES ({values})"
            )

        retry_on_conflict(write)


def bags(ours: DataFrame, theirs: DataFrame) -> DataFrame:
    """Count the copies of each row on two sides.

    :param ours, theirs: rows with the same columns.
    :returns: the distinct rows, and the numbers of copies, ``ours`` and ``theirs``.
    """
    # Zero and minus zero are equal as numbers, not as texts.
    texts = [f.expr(_exact(quoted(name), kind)).alias(name) for name, kind in ours.dtypes]
    one = ours.select(*texts, f.lit(1).alias("ours"), f.lit(0).alias("theirs"))
    other = theirs.select(*texts, f.lit(0).alias("ours"), f.lit(1).alias("theirs"))
    found = one.union(other).groupBy(*ours.columns).agg(f.sum("ours").alias("ours"), f.sum("theirs").alias("theirs"))
    return found.withColumns({name: f.col(name).cast(kind) for name, kind in ours.dtypes if kind in _FLOATS})


def _exact(value: str, kind: str) -> str:
    """Return an expression that is equal only if a value is the same."""
    return f"CAST({value} AS STRING)" if kind in _FLOATS else value


def _kept(rows: DataFrame) -> tuple[DataFrame, int]:
    """Compute rows that are read several times, and keep them on the executors; return them and their number.

    What reads them is planned without the plan that computed them, which would take longer than a small step itself.
    """
    kept = rows.localCheckpoint(eager=False)
    return kept, kept.count()  # one job, which also fills the checkpoint
