"""The shapes of backlogs: a kind of row, a size of transactions, a number of tables.

Half of a backlog's changes are inserts, half are updates of the previous step's inserts, so that sums can verify all of
it. A step inserts and updates the same number of rows of one table; steps take the tables in turn. In a shape with
``updates`` all rows exist at the start, and a step updates rows instead of inserting them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

Transactions = Literal["single", "thousand", "giant"]
"""Transactions of one change each, of a thousand changes each, or one for everything."""
UPDATES = "updates"


@dataclass(frozen=True)
class Row:
    """A kind of row; its key is ``id bigint``.

    :param columns: the other columns, as ``CREATE TABLE`` takes them.
    :param values: their values as SQL expressions of the key ``n``.
    :param touched: the numeric column that an update increments.
    :param also: further assignments of an update.
    :param text: a text column, whose length shows that texts arrive.
    """

    name: str
    columns: str
    values: str
    touched: str
    also: str = ""
    text: str | None = None

    @property
    def sums(self) -> tuple[str, ...]:
        """Return SQL expressions that sum up a mirror, valid in Postgres, MySQL and Spark."""
        lengths = () if self.text is None else (f"sum(length({self.text}))",)
        return ("count(*)", "sum(id)", f"sum({self.touched})", *lengths)

    def ddl(self, table: str) -> str:
        """Return the statement that creates a table."""
        return f"CREATE TABLE public.{table} (id bigint PRIMARY KEY, {self.columns})"

    def insert(self, table: str, first: str | int, last: str | int) -> str:
        """Return the statement that inserts the rows in a range of keys."""
        keys = f"generate_series(({first})::bigint, ({last})::bigint)"
        return f"INSERT INTO public.{table} SELECT n, {self.values} FROM {keys} AS n"

    def update(self, table: str, first: str | int, last: str | int) -> str:
        """Return the statement that updates the rows in a range of keys."""
        changed = f"{self.touched} = {self.touched} + 1{self.also}"
        return f"UPDATE public.{table} SET {changed} WHERE id BETWEEN ({first})::bigint AND ({last})::bigint"


# About 100 bytes, as text and on the wire.
_HUNDRED = (
    "customer int NOT NULL, status text NOT NULL, amount numeric(12, 2) NOT NULL, created_at timestamptz NOT NULL,"
    " note text, paid boolean NOT NULL, code text NOT NULL"
)
_HUNDRED_VALUES = (
    "(n * 31 % 100000)::int, (ARRAY['new', 'paid', 'sent', 'done'])[1 + n % 4], (n * 7919 % 1000003)::numeric / 100,"
    " timestamptz '2024-01-01 00:00+00' + n * interval '61 seconds', md5(n::text), n % 3 = 0, 'item-' || n % 5000"
)
_AMOUNT = {"touched": "amount", "also": ", status = 'changed'", "text": "note"}


def _wide() -> Row:
    """Return a row with 199 columns in addition to the key, whose values are too small to be stored out of line."""
    kinds = (
        ("int", "(n % {})::int"),
        ("text", "'v' || n % {}"),
        ("numeric(10, 2)", "(n % {})::numeric / 100"),
        ("timestamp", "timestamp '2024-01-01' + (n % {}) * interval '1 second'"),
    )
    numbers = range(1, 200)
    columns = ", ".join(f"c{i} {kinds[(i - 1) % 4][0]}" for i in numbers)
    values = ", ".join(kinds[(i - 1) % 4][1].format(1000 + i) for i in numbers)
    return Row("wide", columns, values, touched="c1", text="c2")


NARROW = Row("narrow", "v int NOT NULL", "(n % 1000)::int", touched="v")
HUNDRED = Row("100-byte", _HUNDRED, _HUNDRED_VALUES, **_AMOUNT)
KILOBYTE = Row("1-kb", f"{_HUNDRED}, body text NOT NULL", f"{_HUNDRED_VALUES}, repeat(md5(n::text), 28)", **_AMOUNT)
# Out of line and not compressed. Updates do not touch it, so the log has it only with inserts.
TOASTED = Row(
    "toasted",
    "v int NOT NULL, body text STORAGE EXTERNAL",
    "(n % 1000)::int, repeat(md5(n::text), 250)",
    "v",
    "",
    "body",
)
ROWS = {row.name: row for row in (NARROW, HUNDRED, KILOBYTE, _wide(), TOASTED)}


@dataclass(frozen=True)
class Shape:
    """Rows, transactions and tables of a backlog.

    :param updates: whether it has updates only and no inserts.
    """

    row: Row = HUNDRED
    transactions: Transactions = "thousand"
    tables: int = 1
    updates: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse for example ``wide``, ``single`` or ``narrow,giant,500-tables``; missing parts have their defaults.

        :raises ValueError: with the name of an unknown part.
        """
        shape = cls()
        for part in text.split(","):
            number, _, unit = part.partition("-")
            if part in ROWS:
                shape = replace(shape, row=ROWS[part])
            elif part in get_args(Transactions):
                shape = replace(shape, transactions=part)
            elif unit == "tables" and number.isdigit() and int(number) > 0:
                shape = replace(shape, tables=int(number))
            elif part == UPDATES:
                shape = replace(shape, updates=True)
            else:
                known = ", ".join((*ROWS, *get_args(Transactions), "N-tables", UPDATES))
                raise ValueError(f"{part!r} is not one of {known}")
        return shape

    @property
    def title(self) -> str:
        """Return the parts that differ from the default, as :meth:`parse` reads them, each after a comma."""
        default = Shape()
        parts = (
            (self.row.name, self.row != default.row),
            (self.transactions, self.transactions != default.transactions),
            (f"{self.tables}-tables", self.tables != default.tables),
            (UPDATES, self.updates),
        )
        return "".join(f", {part}" for part, said in parts if said)

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the tables in the schema ``public``."""
        return ["t"] if self.tables == 1 else [f"t{i}" for i in range(self.tables)]

    @property
    def ddl(self) -> Sequence[str]:
        """Return statements that create the tables."""
        return [self.row.ddl(name) for name in self.names]

    def half(self, changes: int) -> int:
        """Return the rows that a step inserts, or updates, and that each table has before the first insert."""
        return {"single": 1, "thousand": 500, "giant": max(1, changes // (2 * self.tables))}[self.transactions]

    def steps(self, changes: int) -> int:
        """Return the number of steps that comes nearest to ``changes``."""
        return max(1, changes // (2 * self.half(changes)))

    def rounds(self, steps: int) -> Sequence[int]:
        """Return the number of steps for each of the tables."""
        return [(steps - i + self.tables - 1) // self.tables for i in range(self.tables)]

    def fill(self, half: int, steps: int) -> Sequence[str]:
        """Return statements that insert the initial rows of the tables."""
        rounds = self.rounds(steps) if self.updates else [0] * self.tables
        return [self.row.insert(name, 1, half * (n + 1)) for name, n in zip(self.names, rounds, strict=True)]

    def write(self, steps: int, half: int) -> str:
        """Return a statement that performs all steps, in transactions of this shape."""
        first, last = f"({{0}}) * {half} + 1", f"({{0}} + 1) * {half}"
        number = "k" if self.tables == 1 else "$1"
        table = "t" if self.tables == 1 else f"t$q$ || i % {self.tables} || $q$"
        ends = {"single": ("COMMIT;", "COMMIT;"), "thousand": ("", "COMMIT;"), "giant": ("", "")}[self.transactions]
        done = [
            (self.row.update if self.updates else self.row.insert)(table, first.format(number), last.format(number)),
            self.row.update(table, first.format(f"{number} - 1"), last.format(f"{number} - 1")),
        ]
        if self.tables > 1:
            done = [f"EXECUTE $q${statement}$q$ USING k" for statement in done]
        body = " ".join(f"{statement}; {end}" for statement, end in zip(done, ends, strict=True))
        loop = f"FOR i IN 0..{steps - 1} LOOP k := i / {self.tables} + 1; {body} END LOOP;"
        return f"DO $$ DECLARE k bigint; BEGIN {loop} END $$"
