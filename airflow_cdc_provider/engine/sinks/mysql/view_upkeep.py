"""Finds the anchors of views that a transaction affects, in MySQL; see :mod:`.transactional.view_upkeep`.

For each table that views read there is a temporary table of images, with a row for each noted row: its key ``k0`` …,
whether it existed (``was``), and the columns that views read, ``r0`` …; or only its key. After a table has been read as
a whole, the views over it are built again, because its rows may have been written in several transactions: no images
are noted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.mysql.bulk_load import Field, constant
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.types import column_types
from airflow_cdc_provider.engine.sinks.mysql.view_record import end_version, record_work
from airflow_cdc_provider.engine.sinks.mysql.view_rows import ViewRows, same
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.sinks.transactional.view_upkeep import Images, ViewUpkeep
from airflow_cdc_provider.engine.views.version import ViewVersion

_GIVEN_KEYS = 1000


class MysqlViewUpkeep(ViewUpkeep):
    """The upkeep of views in a transaction of a MySQL sink."""

    join_operator: ClassVar[str] = "STRAIGHT_JOIN"

    def __init__(
        self, session: Session, pipeline: str, targets: Mapping[str, Target], versions: Sequence[ViewVersion]
    ) -> None:
        super().__init__(targets, versions)
        self._session = session
        self._pipeline = pipeline

    def note_before_reread(self, label: str, keys: Collection[tuple[str, ...]] | None) -> None:
        if keys is not None:
            super().note_before_reread(label, keys)

    def note_after_reread(self, label: str, keys: Collection[tuple[str, ...]] | None) -> None:
        if keys is not None:
            super().note_after_reread(label, keys)

    def _begin(self, label: str, columns: Sequence[str]) -> Images:
        return _Images(self._session, self._targets[label], columns, len(self._images))

    def _affected(self, version: ViewVersion) -> ViewRows:
        return ViewRows(self._session, self._targets, version)

    def _execute(self, statement: str) -> None:
        self._session.run(statement)

    def _end(self, version: ViewVersion, before: LogPosition) -> None:
        end_version(self._session, self._pipeline, version, before)

    def _record(self, version: ViewVersion, behind: LogPosition | None, anchors: int, seconds: float) -> None:
        record_work(self._session, self._pipeline, version, behind, anchors, seconds)


class _Images(Images):
    """The images of a table's rows.

    :param read: the columns of the images.
    :param number: distinguishes the table from those of others.
    """

    def __init__(self, session: Session, target: Target, read: Sequence[str], number: int) -> None:
        self._session = session
        self._target = target
        self.read = tuple(read)
        self._table = quoted(target.schema, target.name)
        self._images = quoted("airflow_cdc", f"cdc_images_{number}")
        self._key = [quoted(name) for name in target.table.key]
        self._numbers = [f"k{n}" for n in range(len(self._key))]
        key = [f"t.{name} AS k{n}" for n, name in enumerate(self._key)]
        values = [f"t.{quoted(name)} AS r{n}" for n, name in enumerate(self.read)]
        # Columns of an outer join may be NULL, whatever the table's definition.
        self._session.run(
            f"CREATE TEMPORARY TABLE {self._images} AS SELECT {', '.join([*key, '1 AS was', *values])}"
            f" FROM (SELECT 1 AS one) AS one LEFT JOIN {self._table} t ON 1 = 0 LIMIT 0"
        )

    def _noted(self, key: Sequence[str], was: str) -> str:
        """Return the columns of an image of a row ``t``."""
        return ", ".join([*key, was, *(f"t.{quoted(name)}" for name in self.read)])

    def _match(self, others: Sequence[str]) -> str:
        """Return the condition that a row ``t`` has a key."""
        return " AND ".join(f"t.{name} = {other}" for name, other in zip(self._key, others, strict=True))

    @property
    def _exists(self) -> str:
        return f"t.{self._key[0]} IS NOT NULL"

    def note_staged(self, staged: Staged) -> None:
        assert staged.relation is not None
        places = [column.name for column in self._target.table.columns]
        key = [f"s.c{places.index(name)}" for name in self._target.table.key]
        stage = quoted("airflow_cdc", staged.relation)
        if not self.read:
            self._session.run(f"INSERT INTO {self._images} SELECT {', '.join(key)}, 0 FROM {stage} s")
            return
        self._session.run(
            f"INSERT INTO {self._images} SELECT {self._noted(key, self._exists)}"
            f" FROM {stage} s LEFT JOIN {self._table} t FORCE INDEX (PRIMARY) ON {self._match(key)}"
        )

    def note_rows(self, keys: Collection[tuple[str, ...]] | None) -> None:
        """Note the rows with some keys, or all; of keys, also that there may be none."""
        key = [f"t.{name}" for name in self._key]
        noted = f"INSERT INTO {self._images} SELECT {self._noted(key, '1')} FROM {self._table} t"
        if keys is None:
            self._session.run(noted)
            return
        kinds, label = column_types(self._target.table), self._target.table.label
        fields = [Field(name, kinds[name]) for name in self._target.table.key]
        given = [", ".join(constant(f, text, label) for f, text in zip(fields, each, strict=True)) for each in keys]
        for start in range(0, len(given), _GIVEN_KEYS):
            places = [f"({place})" for place in given[start : start + _GIVEN_KEYS]]
            self._session.run(f"{noted} WHERE ({', '.join(key)}) IN ({', '.join(places)})")
            nothing = ", NULL" * len(self.read)
            new = ", ".join(f"({place}, 0{nothing})" for place in given[start : start + _GIVEN_KEYS])
            self._session.run(f"INSERT INTO {self._images} VALUES {new}")

    def note_new(self, keys: Collection[tuple[str, ...]] | None) -> None:
        """Do nothing: keys without a row have been noted, too."""

    def anchors(self, key: Sequence[str]) -> str:
        names = [f"i.k{self._target.table.key.index(name)} AS a{n}" for n, name in enumerate(key)]
        return f"SELECT {', '.join(names)} FROM {self._images} i"

    def changed(self, read: Sequence[str], name: str) -> str:
        table = quoted("airflow_cdc", name)
        old = [f"i.r{self.read.index(each)}" for each in read]
        new = [f"t.{quoted(each)}" for each in read]
        match = self._match([f"i.{name}" for name in self._numbers])
        numbered = ", ".join(f"{each} AS r{n}" for n, each in enumerate(old))
        self._session.run(
            f"CREATE TEMPORARY TABLE {table} AS SELECT {numbered} FROM {self._images} i LEFT JOIN {self._table} t"
            f" FORCE INDEX (PRIMARY) ON {match} WHERE i.was = 1 AND NOT ({self._exists} AND {same(old, new)})"
        )
        self._session.run(
            f"INSERT INTO {table} SELECT {', '.join(new)} FROM {self._images} i STRAIGHT_JOIN {self._table} t"
            f" FORCE INDEX (PRIMARY) ON {match} WHERE NOT (i.was = 1 AND {same(old, new)})"
        )
        return table
