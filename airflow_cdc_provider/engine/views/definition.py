"""The definition of a view, as SQL fragments of the sink's dialect, and the ways from its tables to its anchor.

The *anchor* of a view is what it is recomputed by: the key of its first table, or the columns of GROUP BY. Their table
is the *root*. Every row of the view belongs to one anchor, so recomputing all rows of an anchor, or of more anchors
than needed, never leaves a wrong row.

A change of a row affects the anchors that it reaches over the joins: from its own join columns to the row of the table
that it is joined to, and so on to the root. Conditions other than these equalities are ignored on the way, which only
makes more anchors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal


@dataclass(frozen=True)
class Alias:
    """A table of a view's FROM clause.

    :param name: its alias.
    :param label: label of the source table.
    :param columns: the columns that the view reads, sorted.
    :param join: how it is joined to the aliases before it.
    :param condition: its ON clause; empty for the first.
    :param parent: name of the next alias on the way to the root; empty for the root.
    :param equalities: pairs of an own column and an equal column of the parent.
    :param at_most_one: whether its equalities name all columns of its key, so that they match at most one row.
    """

    name: str
    label: str
    columns: tuple[str, ...]
    join: Literal["first", "inner", "left"]
    condition: str = ""
    parent: str = ""
    equalities: tuple[tuple[str, str], ...] = ()
    at_most_one: bool = True

    @property
    def own_columns(self) -> tuple[str, ...]:
        """Return the columns by which it is joined to its parent."""
        return tuple(own for own, _ in self.equalities)


@dataclass(frozen=True)
class AnchorColumn:
    """A column of the anchor.

    :param column: its name in the root's table.
    :param output: its name in the view.
    """

    column: str
    output: str


@dataclass(frozen=True)
class Output:
    """A column of a view: its name, its expression, and the columns of source tables in it, as label and column."""

    name: str
    expression: str
    columns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class View:
    """A view.

    :param schema, name: the table of its rows.
    :param outputs: its columns, in order.
    :param aliases: its tables in the order of the FROM clause.
    :param anchor: the columns of the anchor.
    :param where, having: conditions; empty without.
    :param grouped: whether the anchor is that of GROUP BY.
    :param quote_character: encloses identifiers in the sink's dialect.
    """

    schema: str
    name: str
    outputs: tuple[Output, ...]
    aliases: tuple[Alias, ...]
    anchor: tuple[AnchorColumn, ...]
    where: str
    having: str
    grouped: bool
    quote_character: str

    @property
    def label(self) -> str:
        """Return ``schema.name`` without quotes."""
        return f"{self.schema}.{self.name}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> View:
        """Read a view from the values that :meth:`to_dict` returned."""

        def alias(each: Mapping[str, Any]) -> Alias:
            pairs = tuple((own, theirs) for own, theirs in each["equalities"])
            return Alias(**{**each, "columns": tuple(each["columns"]), "equalities": pairs})

        def output(each: Mapping[str, Any]) -> Output:
            return Output(**{**each, "columns": tuple((label, column) for label, column in each.get("columns", ()))})

        return cls(
            **{
                **values,
                "outputs": tuple(map(output, values["outputs"])),
                "aliases": tuple(map(alias, values["aliases"])),
                "anchor": tuple(AnchorColumn(**each) for each in values["anchor"]),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the view as JSON values."""
        return dataclasses.asdict(self)

    def quote(self, name: str) -> str:
        """Quote an identifier."""
        mark = self.quote_character
        return f"{mark}{name.replace(mark, 2 * mark)}{mark}"

    @property
    def root(self) -> Alias:
        """Return the table of the anchor, the only one without a parent."""
        return next(alias for alias in self.aliases if not alias.parent)

    @property
    def keyed_root(self) -> str | None:
        """Return the label of the root if a row of its table affects no anchor but its own key, otherwise ``None``.

        It may affect others with GROUP BY, or if the table is joined to itself.
        """
        alone = sum(alias.label == self.root.label for alias in self.aliases) == 1
        return self.root.label if alone and not self.grouped else None

    @property
    def one_row(self) -> bool:
        """Return whether an anchor has at most one row."""
        return self.grouped or all(alias.at_most_one for alias in self.aliases)

    @cached_property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """Return by label of a source table the columns that the view reads, sorted."""
        found: dict[str, set[str]] = {}
        for alias in self.aliases:
            found.setdefault(alias.label, set()).update(alias.columns)
        return {label: tuple(sorted(names)) for label, names in found.items()}

    def path(self, alias: Alias) -> tuple[Alias, ...]:
        """Return the aliases from one alias to the root, both included."""
        by_name = {each.name: each for each in self.aliases}
        found = [alias]
        while found[-1].parent:
            found.append(by_name[found[-1].parent])
        return tuple(found)

    def walks(self, changed: Mapping[str, str], tables: Mapping[str, str], join: str = "JOIN") -> list[str]:
        """Return the queries of the anchors, ``a0`` …, that changed rows reach: one for each alias of a changed table.

        :param changed: by label of a source table, a relation of changed rows, whose columns ``r0`` … are those that
            the view reads, in their order.
        :param tables: by label of a source table, the relation to read.
        :param join: the operator of inner joins, which lead from the changed rows to the root.
        """
        return [
            self._walk(alias, changed[alias.label], tables, join) for alias in self.aliases if alias.label in changed
        ]

    def _walk(self, alias: Alias, changed: str, tables: Mapping[str, str], join: str) -> str:
        path, columns = self.path(alias), self.columns[alias.label]

        def value(step: int, column: str) -> str:
            return f"j{step}.{self.quote(column)}" if step else f"j0.r{columns.index(column)}"

        joins = [f"FROM {changed} j0"]
        for step, (each, parent) in enumerate(pairwise(path)):
            equal = (f"{value(step + 1, theirs)} = {value(step, own)}" for own, theirs in each.equalities)
            joins.append(f"{join} {tables[parent.label]} j{step + 1} ON {' AND '.join(equal)}")
        anchor = (f"{value(len(path) - 1, each.column)} AS a{n}" for n, each in enumerate(self.anchor))
        return f"SELECT {', '.join(anchor)} {' '.join(joins)}"

    @property
    def looked_up(self) -> dict[tuple[str, tuple[str, ...]], None]:
        """Return the columns by which rows are looked up, as label and columns, in an order of use.

        An index on each of them makes the cost of a change independent of the size of the tables.
        """
        found: dict[tuple[str, tuple[str, ...]], None] = {
            (self.root.label, tuple(each.column for each in self.anchor)): None
        }
        for alias in self.aliases:
            if alias.parent:
                found[alias.label, alias.own_columns] = None
                found[self.path(alias)[1].label, tuple(theirs for _, theirs in alias.equalities)] = None
        return found

    def select(self, tables: Mapping[str, str], restriction: tuple[str, str] | None = None) -> str:
        """Return the SELECT.

        :param tables: by label of a source table, the relation to read.
        :param restriction: a relation with an alias, and a condition of it and the root; only rows that match are
            selected.
        """
        joins = []
        for alias in self.aliases:
            table = f"{tables[alias.label]} AS {self.quote(alias.name)}"
            if alias.join == "first":
                joins.append(f"FROM {table}")
            else:
                joins.append(f"{'LEFT JOIN' if alias.join == 'left' else 'JOIN'} {table} ON {alias.condition}")
            if not alias.parent and restriction is not None:
                joins.append(f"JOIN {restriction[0]} ON {restriction[1]}")
        columns = ", ".join(f"{output.expression} AS {self.quote(output.name)}" for output in self.outputs)
        parts = ["SELECT", columns, *joins]
        if self.where:
            parts.append(f"WHERE {self.where}")
        if self.grouped:
            groups = (f"{self.quote(self.root.name)}.{self.quote(each.column)}" for each in self.anchor)
            parts.append(f"GROUP BY {', '.join(groups)}")
        if self.having:
            parts.append(f"HAVING {self.having}")
        return " ".join(parts)
