"""Tables, their columns and their leaves, as the catalog of the source describes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.type_shape import TypeShape


@dataclass(frozen=True)
class Column:
    """A captured column.

    :param type: its type as SQL with modifier, schema-qualified unless it lives in ``pg_catalog``.
    :param collation: its collation, quoted and qualified, if it is not the type's own; else ``None``.
    :param builtin: whether the type, or the element of an array, comes with Postgres; a domain never does.
    :param operators: the source's operators for less, equal, and greater or equal, in the syntax of ``OPERATOR()``;
        ``None`` if they are those of ``pg_catalog``. Without them, ``citext`` is compared as ``text``, and ``hstore``
        cannot be compared at all.
    :param attnum: its number in the table, which survives renaming and is never reused.
    :param xmin: the transaction that last changed its entry in the catalog.
    :param missing: text of the value of rows that are older than the column, ``None`` for null.
    :param uniform: whether these rows have that value in all leaves.
    :param type_modifier: the part of ``type`` in parentheses, as a number; -1 without.
    :param beneath: for a domain its base type in the syntax of a cast, with the column's collation. A row's value may
        violate the domain if a constraint was added as NOT VALID.
    :param parts: those components of the type, beneath arrays, domains and ranges, that change how its values read:
        each label of an enum with the transaction that gave it, and the attributes of a composite. ``None`` if there
        are none, or if they have not been read.
    :param shape: the shape of a type that does not come with Postgres; ``None`` in records that older versions wrote.
    """

    name: str
    type: str
    type_oid: int
    collation: str | None
    not_null: bool
    builtin: bool
    operators: tuple[str, ...] | None = None
    attnum: int = field(default=0, compare=False)
    xmin: str = field(default="", compare=False)
    missing: str | None = field(default=None, compare=False)
    uniform: bool = field(default=True, compare=False)
    type_modifier: int = field(default=-1, compare=False)
    beneath: str | None = field(default=None, compare=False)
    parts: Mapping[str, str] | None = field(default=None, compare=False)
    shape: TypeShape | None = field(default=None, compare=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Column:
        """Read a column from JSON values."""
        operators, shape = values.get("operators"), values.get("shape")
        return cls(
            **{
                **values,
                "operators": tuple(operators) if operators else None,
                "shape": TypeShape.from_dict(shape) if shape else None,
            }
        )


@dataclass(frozen=True)
class Leaf:
    """A table that stores rows: the captured table itself, or a leaf of its partition tree.

    :param filenode: the file of its rows; it changes if the table is rewritten or truncated.
    :param toast: oid of its TOAST table, 0 without one. SET LOGGED creates another one; VACUUM FULL, CLUSTER and
        TRUNCATE do not. ``None`` in records that older versions wrote.
    :param place: the transactions that moved it, and its ancestors, into their schemas and under their parents; empty
        in records that older versions wrote.
    :param streamed: whether all changes that it had before it got this file have been published, see
        :mod:`.catalog_watch`.
    """

    oid: int
    schema: str
    name: str
    filenode: int = field(default=0, compare=False)
    toast: int | None = field(default=None, compare=False)
    place: str = field(default="", compare=False)
    streamed: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Table:
    """A captured table.

    :param columns: the captured columns in the order of the table. Generated columns, stored ones included, are
        excluded: Postgres before 18 does not stream them, and the target can compute them itself.
    :param key: names of the key columns in the order of the key's index: the columns of the replica identity, or of
        the primary key under FULL; empty if there are none.
    :param replica_identity: that of the leaves: ``d`` primary key, ``i`` an index, ``f`` full (``n``, nothing, is
        never captured).
    :param where: the rule's condition on the rows, ``None`` for all.
    :param leaves: in the order of their oids.
    :param kind: ``r`` an ordinary table, ``p`` a partitioned one.
    :param column_list: whether the rule names the columns; the pipeline's own publication then names them, too.
    :param attnums: the highest number that any column of the table has had, dropped columns included.
    :param key_constraint: oid of the key's constraint (or of its index if it has no constraint) if the log does not
        show that the key was recreated; else 0.
    :param generated: names of the generated columns; from Postgres 18 on, a publication that users made may stream
        them.
    """

    oid: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    replica_identity: str
    where: str | None
    leaves: tuple[Leaf, ...]
    kind: str
    column_list: bool = False
    attnums: int = field(default=0, compare=False)
    key_constraint: int = field(default=0, compare=False)
    generated: tuple[str, ...] = field(default=(), compare=False)

    @property
    def label(self) -> str:
        """Return ``schema.name`` without quotes, which identifies the table in messages and records."""
        return f"{self.schema}.{self.name}"

    @property
    def key_columns(self) -> tuple[Column, ...]:
        """Return the columns of :attr:`key`."""
        columns = {column.name: column for column in self.columns}
        return tuple(columns[name] for name in self.key)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON values; :meth:`from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Table:
        """Read a table from the values that :meth:`to_dict` returned."""
        return cls(
            **{
                **values,
                "columns": tuple(map(Column.from_dict, values["columns"])),
                "key": tuple(values["key"]),
                "leaves": tuple(Leaf(**leaf) for leaf in values["leaves"]),
                "generated": tuple(values.get("generated", ())),
            }
        )


def quote_identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
