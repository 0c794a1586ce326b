"""The demo of views: a wide table and an aggregate that move with the mirror while customers buy and move.

From the moment when the views are built, they are compared with their SELECTs, again and again and at the end, each
time in one MVCC snapshot of the sink.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Any

import psycopg

from demo import shop, shop_writers, tables
from demo.screen import Comparison, Screen, comparison_table, facts
from demo.tables import ShopMoment, ShopRun, ShopStage, summary

SCALE = 0.1
TRANSACTIONS_PER_SECOND = 100.0
LIVE_SECONDS = 12.0
PAUSE_SECONDS = 0.2
"""Seconds between two comparisons."""

INTRODUCTION = """\
This demo copies a shop of 100,000 rows from Postgres to another Postgres, and keeps two views of the copy: a wide
table of order lines, and the sales of each city. Customers buy and move, and products are renamed. The views are
compared with their SELECTs all the time. This takes about two minutes, and everything started here is stopped at
the end.
"""

VIEWS: Mapping[str, str] = {
    "dwd.lines_wide": """\
SELECT l.order_no, l.line_no, o.status, c.name AS customer, c.city, p.title AS product, l.price
FROM shop.order_lines AS l
JOIN shop.orders AS o ON o.order_no = l.order_no
LEFT JOIN shop.customers AS c ON c.id = o.customer_id
LEFT JOIN shop.products AS p ON p.article = l.article
""",
    "dws.city_sales": """\
SELECT c.city, count(*) AS orders, sum(o.total) AS total
FROM shop.customers AS c
JOIN shop.orders AS o ON o.customer_id = c.id
GROUP BY c.city
""",
}

# Rows are compared as text, because 1.0 and 1.00 are equal as numbers.
_COMPARE = """
WITH wanted AS MATERIALIZED (SELECT s::text AS line FROM ({select}) AS s),
found AS MATERIALIZED (SELECT v::text AS line FROM {view} AS v)
SELECT (SELECT count(*) FROM wanted), (SELECT count(*) FROM found),
    (SELECT count(*) FROM (TABLE wanted EXCEPT ALL TABLE found) AS lacking)
        + (SELECT count(*) FROM (TABLE found EXCEPT ALL TABLE wanted) AS extra)
"""


def section(views: Mapping[str, str]) -> str:
    """Return the lines of the pipeline file that define views."""
    texts = (f"    {name}:\n      sql: |\n{indent(text, ' ' * 8)}" for name, text in views.items())
    return f"  views:\n{''.join(texts)}"


@dataclass
class Comparer:
    """Compares views with their SELECTs.

    :param dsn: address of the sink, whose mirror tables have the names of the source's.
    :param rounds: number of comparisons of all views.
    :param states: the applied LSNs at which they were compared.
    :param different: descriptions of differences.
    :param latest: the result of the latest comparison.
    """

    dsn: str
    views: Mapping[str, str]
    rounds: int = 0
    states: set[str] = field(default_factory=set)
    different: list[str] = field(default_factory=list)
    latest: Sequence[Comparison] = ()

    def compare(self) -> None:
        """Compare all views in one snapshot."""
        with psycopg.connect(self.dsn, client_encoding="UTF8") as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            ((state,),) = connection.execute("SELECT applied_lsn::text FROM airflow_cdc.pipelines").fetchall()
            self.latest = [self._compare(connection, name, state) for name in self.views]
        self.rounds += 1
        self.states.add(state)

    def _compare(self, connection: psycopg.Connection, name: str, state: str) -> Comparison:
        query = _COMPARE.format(select=self.views[name], view=name)
        ((wanted, found, different),) = connection.execute(query.encode()).fetchall()
        if different:
            self.different.append(f"{different} rows of {name} differ from its SELECT at {state}")
        return Comparison(name, wanted, found, not different)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Compare again and again during the block."""
        halt = threading.Event()

        def repeat() -> None:
            while not halt.wait(PAUSE_SECONDS):
                self.compare()

        with ThreadPoolExecutor(1) as pool:
            comparing = pool.submit(repeat)
            try:
                yield
            finally:
                halt.set()
            comparing.result()


def begin(started: ExitStack, directory: Path, screen: Screen) -> WideRun:
    """Set the stage, start the writers, and trigger the Dag."""
    screen.print(INTRODUCTION)
    stage = tables.set_stage(started, directory, screen, scale=SCALE, views=section(VIEWS))
    with psycopg.connect(stage.source, client_encoding="UTF8") as connection:
        connection.execute(shop.PRODUCTS_AND_CITIES)
    screen.print(f"\n{stage.file}:\n\n{stage.file.read_text(encoding='utf-8')}")
    writers = shop_writers.Writers(stage.source, TRANSACTIONS_PER_SECOND, transactions=shop.WIDE_TRANSACTIONS)
    started.enter_context(writers)
    screen.say(f"Customers are now buying and moving: {TRANSACTIONS_PER_SECOND:.0f} transactions per second.")
    return WideRun(stage, screen, writers)


class WideRun(ShopRun):
    """The run that keeps views of the shop."""

    groups = 1

    def __init__(self, stage: ShopStage, screen: Screen, writers: shop_writers.Writers) -> None:
        super().__init__(stage, screen, writers)
        self._comparer = Comparer(stage.warehouse.address, VIEWS)
        self._comparing = ExitStack()

    def live(self) -> list[ShopMoment]:
        self.until("the views", lambda moment: all(view["as_of"] for view in moment.status["views"]))
        self.screen.say(
            "The views are built: from now on they move with the copy, and are compared with their SELECTs."
        )
        self._comparing.enter_context(self._comparer.repeating())
        return self.some_time(LIVE_SECONDS)

    def perform(self) -> bool:
        with self._comparing:
            outcome = self.outcome()
        self._comparer.compare()
        unequal = [view["view"] for view in outcome.verified["views"] if not view["equal"]]
        problems = [
            *outcome.problems,
            *self._comparer.different,
            *(f"verify finds a difference in {n}" for n in unequal),
        ]
        return self.conclude(
            f"{summary(outcome)}\n\n{view_summary(self._comparer, outcome.course.end.status['views'])}",
            problems,
            "each view was its SELECT in every snapshot, and the copy is the source.",
        )


def view_summary(comparer: Comparer, views: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of compared views, and what their upkeep has cost.

    :param views: states of the views, as ``airflow-cdc status`` returns them.
    """
    compared = comparison_table(("view", "rows of its SELECT", "rows"), comparer.latest)
    states, different = len(comparer.states), len(comparer.different)
    told = [
        (
            "comparisons",
            f"{comparer.rounds:,} of each view, in {states:,} states of the copy, {different:,} with differences",
        )
    ]
    for view in views:
        work = f"{view['units']:,} units with {view['anchors']:,} anchors, {view['milliseconds_per_unit']} ms a unit"
        told.append((view["view"].partition(".")[2], work))
    return f"{compared}\n\n{facts(told)}"
