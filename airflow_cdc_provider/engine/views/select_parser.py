"""Parses the SELECT of a view, and refuses what cannot be kept equal to it at every commit.

``sqlglot`` parses. Names are resolved here, against the captured columns of the source tables, so that the definition
knows the columns that each table contributes. Types and functions are the server's concern, which has the last word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NoReturn, TypeAlias

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.normalize_identifiers import normalize_identifiers

from airflow_cdc_provider.engine.core.errors import ConfigError, UnknownColumn
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.views.definition import Alias, AnchorColumn, Output, View
from airflow_cdc_provider.engine.views.dialects import DIALECTS
from airflow_cdc_provider.engine.views.refusals import refuse_constructs
from airflow_cdc_provider.engine.views.settings import ViewSettings

RESERVED_ALIAS = "cdc_anchor"
RESERVED_OUTPUTS = ("cdc_text", "cdc_copy")
Dialect: TypeAlias = Literal["postgres", "mysql", "spark"]
Equality: TypeAlias = tuple[exp.Column, exp.Column]


def parse_view(settings: ViewSettings, tables: Mapping[str, Table], dialect: Dialect) -> View:
    """Parse a view.

    :param tables: the captured tables by label.
    :param dialect: the dialect of the sink.
    :raises ConfigError: when the SELECT is not one that can be maintained; says what to write instead.
    """
    return _Parser(settings, tables, dialect).parse()


class _Parser:
    """The parser of one view."""

    def __init__(self, settings: ViewSettings, tables: Mapping[str, Table], dialect: str) -> None:
        self._settings = settings
        self._tables = tables
        self._dialect = dialect
        self._grammar = DIALECTS[dialect]
        self._scope: dict[str, Table] = {}
        self._used: dict[str, set[str]] = {}

    def parse(self) -> View:
        select = self._statement()
        refuse_constructs(select, self._dialect, self._refuse)
        self._exchange_right_join(select)
        sources = [select.args["from_"].this, *(join.this for join in select.args.get("joins") or ())]
        for source in sources:
            self._enter(source)
        self._replace_output_names(select)
        for column in list(select.find_all(exp.Column)):
            self._resolve(column)
        outputs = self._outputs(select)
        aliases = self._aliases(select, sources)
        group = select.args.get("group")
        if group is None and any(True for _ in select.find_all(exp.AggFunc)):
            self._refuse("it has aggregates without GROUP BY", "Add GROUP BY with columns of one table.")
        root, columns = self._anchor(aliases, group)
        rooted = self._rooted(aliases, root)
        return View(
            self._settings.schema,
            self._settings.name,
            tuple(Output(name, self._sql(expression), self._columns(expression)) for name, expression in outputs),
            rooted,
            self._selected(root, columns, outputs),
            self._clause(select, "where"),
            self._clause(select, "having"),
            group is not None,
            self._quote("")[0],
        )

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise ConfigError(f"view {self._settings.label}: {what}", instead)

    def _sql(self, expression: exp.Expr) -> str:
        return expression.sql(self._grammar, identify=True, comments=False)

    def _quote(self, name: str) -> str:
        return exp.to_identifier(name, quoted=True).sql(self._grammar)

    def _clause(self, select: exp.Select, name: str) -> str:
        clause = select.args.get(name)
        return "" if clause is None else self._sql(clause.this)

    def _statement(self) -> exp.Select:
        try:
            parsed = sqlglot.parse(self._settings.sql, read=self._grammar)
        except SqlglotError as e:
            self._refuse(f"its SQL cannot be parsed: {str(e).splitlines()[0]}", "Correct the SELECT.")
        statements = [each for each in parsed if each is not None and not isinstance(each, exp.Semicolon)]
        if len(statements) != 1 or not isinstance(statements[0], exp.Select):
            union = bool(statements) and isinstance(statements[0], exp.SetOperation)
            kind = "set operations are" if union else "anything else is"
            self._refuse(f"it has to be one SELECT; {kind} not supported", "Write one SELECT, or several views.")
        return normalize_identifiers(statements[0], dialect=self._grammar)

    # -- names -------------------------------------------------------------------------------------

    def _enter(self, source: exp.Expr) -> None:
        """Add a table of the FROM clause to the scope."""
        if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
            self._refuse(
                f"FROM names something other than a table: {self._sql(source)}",
                "Join the tables themselves; write a subquery as a view of another pipeline.",
            )
        label = self._label(source)
        name = source.alias or source.name
        if name == RESERVED_ALIAS:
            self._refuse(f"a table has the alias {name}, which the engine uses", "Give it another alias (`AS …`).")
        if name in self._scope:
            self._refuse(f"two tables have the alias {name}", "Give each table another alias (`AS …`).")
        self._scope[name] = self._tables[label]
        self._used[name] = set()

    def _label(self, source: exp.Table) -> str:
        if source.db:
            label = f"{source.db}.{source.name}"
            found = [each for each in self._tables if self._same(each, label)]
        else:
            label = source.name
            found = [each for each, table in self._tables.items() if self._same(table.name, label)]
        if len(found) != 1 or source.catalog:
            known = ", ".join(sorted(self._tables))
            what = "is captured in several schemas" if found else "is not captured"
            self._refuse(f"the table {label} {what}", f"Name one of the captured tables with its schema: {known}.")
        return found[0]

    def _same(self, name: str, written: str) -> bool:
        """Return whether a table has the name that is written; Spark ignores the case of letters."""
        return name == written or (self._dialect == "spark" and name.lower() == written.lower())

    def _replace_output_names(self, select: exp.Select) -> None:
        """Replace positions and names of outputs in GROUP BY and HAVING by their expressions."""
        named = {each.output_name: each.unalias() for each in select.selects if each.output_name}
        group, having = select.args.get("group"), select.args.get("having")
        groups = group.expressions if group is not None else []
        for n, each in enumerate(groups):
            if isinstance(each, exp.Literal) and each.is_int:
                position = int(each.this)
                if not 1 <= position <= len(select.selects):
                    self._refuse(f"GROUP BY {position} is not in the SELECT list", "Group by columns of one table.")
                groups[n].replace(select.selects[position - 1].unalias().copy())
        for clause in (group, having):
            for column in list(clause.find_all(exp.Column)) if clause is not None else ():
                if not column.table and not self._having(column.name) and column.name in named:
                    column.replace(named[column.name].copy())

    def _having(self, column: str) -> list[str]:
        """Return the aliases whose table has a column."""
        return [name for name, table in self._scope.items() if self._find(table, column) is not None]

    def _find(self, table: Table, column: str) -> str | None:
        """Return a table's column; MySQL ignores the case of their names."""
        names = [each.name for each in table.columns]
        if self._dialect != "postgres" and column not in names:
            folded = [name for name in names if name.lower() == column.lower()]
            return folded[0] if len(folded) == 1 else None
        return column if column in names else None

    def _resolve(self, column: exp.Column) -> None:
        """Qualify a column with its alias, and note that it is read."""
        shown = ".".join(part.name for part in column.parts)
        if column.args.get("db") is not None:
            self._refuse(f"{shown} names a schema", "Write `alias.column`.")
        holders = [column.table] if column.table else self._having(column.name)
        if len(holders) > 1:
            self._refuse(f"the column {shown} is ambiguous: {', '.join(holders)} have it", "Write `alias.column`.")
        table = self._scope.get(holders[0]) if holders else None
        found = self._find(table, column.name) if table is not None else None
        if found is None:
            where = f"{table.label} has no such captured column" if table is not None else "no table of the view has it"
            raise UnknownColumn(
                f"view {self._settings.label}: the column {shown} is unknown: {where}",
                "Correct its name, or capture the column (`source.tables`).",
            )
        self._require_known_operators(column, holders[0], found)
        column.set("table", exp.to_identifier(holders[0], quoted=True))
        column.set("this", exp.to_identifier(found, quoted=True))
        self._used[holders[0]].add(found)

    def _columns(self, expression: exp.Expr) -> tuple[tuple[str, str], ...]:
        """Return the columns of source tables in a resolved expression, sorted."""
        return tuple(sorted({(self._scope[each.table].label, each.name) for each in expression.find_all(exp.Column)}))

    def _require_known_operators(self, column: exp.Column, alias: str, name: str) -> None:
        """Refuse operators of a type that are not those of ``pg_catalog``, which sessions of a sink would not find.

        ``citext`` would be compared as ``text``.
        """
        (described,) = (each for each in self._scope[alias].columns if each.name == name)
        if described.operators is not None and not isinstance(column.parent, exp.Select | exp.Alias | exp.Cast):
            self._refuse(
                f"{alias}.{name} of type {described.type} is compared or computed with, but its operators are those of"
                " an extension",
                f"Write `CAST({alias}.{name} AS text)`, or only select the column.",
            )

    def _outputs(self, select: exp.Select) -> list[tuple[str, exp.Expr]]:
        outputs = [(each.output_name, each.unalias()) for each in select.selects]
        for each in select.selects:
            if not isinstance(each, exp.Alias | exp.Column):
                self._refuse(f"the column {self._sql(each)} has no name", "Name it with AS.")
        names = [name for name, _ in outputs]
        for name in names:
            if name in RESERVED_OUTPUTS:
                self._refuse(f"a column is named {name}, which the engine uses", "Name it differently with AS.")
            if names.count(name) > 1:
                self._refuse(f"two of its columns are named {name}", "Name one of them differently with AS.")
        return outputs

    # -- joins -------------------------------------------------------------------------------------

    def _exchange_right_join(self, select: exp.Select) -> None:
        """Write ``a RIGHT JOIN b`` as ``b LEFT JOIN a`` if it is the first join."""
        joins = select.args.get("joins") or []
        for n, join in enumerate(joins):
            if join.side == "RIGHT":
                if n:
                    self._refuse("it has a RIGHT JOIN after another join", "Begin with that table, and use LEFT JOIN.")
                first = select.args["from_"].this
                select.args["from_"].set("this", join.this)
                join.set("this", first)
                join.set("side", "LEFT")

    def _aliases(self, select: exp.Select, sources: Sequence[exp.Table]) -> list[Alias]:
        """Return the aliases in the order of FROM; the parent of each is an alias before it."""
        names = [source.alias or source.name for source in sources]
        found = [self._alias(names[0], "first")]
        for n, join in enumerate(select.args.get("joins") or (), start=1):
            name, earlier = names[n], names[:n]
            on = join.args.get("on")
            equalities = list(_equalities(on, name, earlier)) if on is not None else []
            if not equalities:
                self._refuse(
                    f"the join of {name} has no equality between one of its columns and a column of an earlier table",
                    f"Write `JOIN … AS {name} ON {name}.column = {earlier[-1]}.column`; further conditions may follow.",
                )
            key = set(self._scope[name].key)
            alike = {own.name for own, theirs in equalities if self._alike(own, theirs)}
            by_parent: dict[str, list[tuple[str, str]]] = {}
            for own, theirs in equalities:
                by_parent.setdefault(theirs.table, []).append((own.name, theirs.name))
            # Of several, the one that leads to the fewest rows.
            parent = max(by_parent, key=lambda each: (len({own for own, _ in by_parent[each]} & key), each == names[0]))
            found.append(
                replace(
                    self._alias(name, "left" if join.side == "LEFT" else "inner"),
                    condition=self._sql(on),
                    parent=parent,
                    equalities=tuple(dict.fromkeys(by_parent[parent])),
                    at_most_one=bool(key) and key <= alike,
                )
            )
        return found

    def _alike(self, own: exp.Column, theirs: exp.Column) -> bool:
        """Return whether two columns have one type; among other types, several values may equal one of the other."""
        kinds = {
            column.type_oid
            for each in (own, theirs)
            for column in self._scope[each.table].columns
            if column.name == each.name
        }
        return len(kinds) == 1

    def _alias(self, name: str, join: Literal["first", "inner", "left"]) -> Alias:
        return Alias(name, self._scope[name].label, tuple(sorted(self._used[name])), join)

    def _rooted(self, aliases: Sequence[Alias], root: str) -> tuple[Alias, ...]:
        """Turn the joins between the first table and the root around, so that all of them lead to the root.

        This requires inner joins: in the rows of an outer join, the root could be missing.
        """
        found = {alias.name: alias for alias in aliases}
        child = found[root]
        parent, equalities = "", tuple[tuple[str, str], ...]()
        while True:
            next_parent, next_equalities = child.parent, tuple((theirs, own) for own, theirs in child.equalities)
            if next_parent and child.join == "left":
                self._refuse(
                    f"it groups by columns of {root}, which a LEFT JOIN may leave without a row",
                    f"Use JOIN for {child.name}, or begin with {root} (`FROM {root} LEFT JOIN …`).",
                )
            found[child.name] = replace(child, parent=parent, equalities=equalities)
            if not next_parent:
                return tuple(found[alias.name] for alias in aliases)
            parent, equalities, child = child.name, next_equalities, found[next_parent]

    # -- anchor ------------------------------------------------------------------------------------

    def _anchor(self, aliases: Sequence[Alias], group: exp.Group | None) -> tuple[str, tuple[str, ...]]:
        """Return the alias and the columns of the anchor."""
        if group is None:
            root, key = aliases[0].name, self._scope[aliases[0].name].key
            if not key:
                self._refuse(
                    f"its first table {aliases[0].label} has no key, by which its rows would be recomputed",
                    "Begin with a table that has a key, or group by columns of one table.",
                )
            return root, key
        columns = group.expressions
        if not columns or not all(isinstance(each, exp.Column) for each in columns):
            self._refuse("GROUP BY has something other than columns", "Group by columns of one table.")
        tables = list(dict.fromkeys(column.table for column in columns))
        if len(tables) > 1:
            self._refuse(
                f"GROUP BY has columns of several tables: {', '.join(tables)}",
                f"Group by columns of {tables[0]} only; or make a view that joins without grouping.",
            )
        return tables[0], tuple(dict.fromkeys(column.name for column in columns))

    def _selected(
        self, root: str, columns: Collection[str], outputs: Sequence[tuple[str, exp.Expr]]
    ) -> tuple[AnchorColumn, ...]:
        """Return the columns of the anchor with their names in the view."""
        selected = {
            expression.name: name
            for name, expression in reversed(outputs)
            if isinstance(expression, exp.Column) and expression.table == root
        }
        lacking = [f"{root}.{column}" for column in columns if column not in selected]
        if lacking:
            self._refuse(
                f"it does not select {', '.join(lacking)}, by which its rows are recomputed",
                f"Add {', '.join(lacking)} to the SELECT list.",
            )
        for each in self._scope[root].columns:
            if each.name in columns and each.operators is not None:
                self._refuse(
                    f"it is recomputed by {root}.{each.name}, whose type {each.type} has operators of an extension",
                    "Begin with another table, or group by other columns.",
                )
        return tuple(AnchorColumn(column, selected[column]) for column in columns)


def _equalities(on: exp.Expr, name: str, earlier: Sequence[str]) -> Iterator[Equality]:
    """Yield the equalities of a condition between a column of an alias and one of an earlier alias."""
    on = on.unnest()
    if isinstance(on, exp.And):
        yield from _equalities(on.this, name, earlier)
        yield from _equalities(on.expression, name, earlier)
    elif isinstance(on, exp.EQ):
        sides = on.this.unnest(), on.expression.unnest()
        for own, theirs in (sides, sides[::-1]):
            columns = isinstance(own, exp.Column) and isinstance(theirs, exp.Column)
            if columns and own.table == name and theirs.table in earlier:
                yield own, theirs
