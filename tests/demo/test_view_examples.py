"""The examples of the page about views: Postgres accepts what is shown, and what the page calls refused is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import yaml

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.sinks.postgres.view_checks import checked_view
from airflow_cdc_provider.engine.views.settings import ViewSettings
from demo import shop
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, create_database, drop_database
from tests.support.pipelines import PipelineUnderTest

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = yaml.safe_load((DOCS / "examples" / "shop_views.yaml").read_text(encoding="utf-8"))

LINES = "FROM shop.order_lines l JOIN shop.orders o ON o.order_no = l.order_no"
BUYERS = "FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id"
KEY = "SELECT o.id, o.total"
ORDERS = f"{KEY} FROM shop.orders o"
CUSTOMERS = "shop.customers c ON c.id = o.customer_id"

# For each row of the page's table: SELECTs that are refused, and SELECTs that are written instead.
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "FULL JOIN": ([f"{ORDERS} FULL JOIN {CUSTOMERS}"], [f"{ORDERS} LEFT JOIN {CUSTOMERS}"]),
    "CROSS JOIN, or ON without an equality of columns": (
        [
            f"{ORDERS} CROSS JOIN shop.customers c",
            f"{ORDERS}, shop.customers c WHERE c.id = o.customer_id",
            f"{ORDERS} JOIN shop.customers c ON c.id < o.customer_id",
            f"{ORDERS} JOIN shop.customers c ON c.id = o.customer_id + 1",
        ],
        [f"{KEY} {BUYERS} AND c.balance < o.total"],
    ),
    "USING, NATURAL JOIN": (
        [
            "SELECT l.order_no, l.line_no FROM shop.order_lines l JOIN shop.orders o USING (order_no)",
            "SELECT l.order_no, l.line_no FROM shop.order_lines l NATURAL JOIN shop.orders o",
        ],
        [f"SELECT l.order_no, l.line_no {LINES}"],
    ),
    "RIGHT JOIN after another join": (
        [f"SELECT l.order_no, l.line_no {LINES} RIGHT JOIN {CUSTOMERS}"],
        [f"{KEY} FROM shop.customers c RIGHT JOIN shop.orders o ON o.customer_id = c.id"],
    ),
    "a subquery, EXISTS, WITH, LATERAL": (
        [
            f"{ORDERS} WHERE o.customer_id IN (SELECT id FROM shop.customers)",
            f"{KEY}, (SELECT max(l.price) FROM shop.order_lines l) AS m FROM shop.orders o",
            f"{ORDERS} WHERE NOT EXISTS (SELECT 1 FROM shop.customers c WHERE c.id = o.customer_id)",
            f"WITH c AS (SELECT id FROM shop.customers) {ORDERS} JOIN c ON c.id = o.customer_id",
            f"{ORDERS} JOIN LATERAL (SELECT 1 AS x) s ON s.x = o.customer_id",
        ],
        [f"{ORDERS} LEFT JOIN {CUSTOMERS} WHERE c.id IS NULL"],
    ),
    "a window function, ORDER BY, LIMIT": (
        [f"{KEY}, row_number() OVER () AS n FROM shop.orders o", f"{ORDERS} ORDER BY 1", f"{ORDERS} LIMIT 9"],
        [],
    ),
    "DISTINCT": (
        ["SELECT DISTINCT o.status FROM shop.orders o"],
        ["SELECT o.status FROM shop.orders o GROUP BY o.status"],
    ),
    "UNION": (["SELECT o.id FROM shop.orders o UNION SELECT o.id FROM shop.orders o"], []),
    "`*`": (["SELECT * FROM shop.orders", "SELECT o.* FROM shop.orders o"], [ORDERS]),
    "no key of the first table in the SELECT list": (["SELECT o.total FROM shop.orders o"], [ORDERS]),
    "an aggregate without GROUP BY": (
        ["SELECT count(*) AS n FROM shop.orders o"],
        ["SELECT o.status, count(*) AS n FROM shop.orders o GROUP BY o.status"],
    ),
    "GROUP BY columns of two tables, or an expression": (
        [
            f"SELECT c.id, o.status, count(*) AS n {BUYERS} GROUP BY c.id, o.status",
            "SELECT lower(o.status) AS s, count(*) AS n FROM shop.orders o GROUP BY lower(o.status)",
        ],
        [f"SELECT o.customer_id, max(c.name) AS name, count(*) AS n {BUYERS} GROUP BY o.customer_id"],
    ),
    "GROUP BY a table that a LEFT JOIN may leave without a row": (
        [f"SELECT c.name, count(*) AS n FROM shop.orders o LEFT JOIN {CUSTOMERS} GROUP BY c.name"],
        [
            f"SELECT c.name, count(*) AS n {BUYERS} GROUP BY c.name",
            "SELECT c.name, count(o.id) AS n FROM shop.customers c LEFT JOIN shop.orders o ON o.customer_id = c.id"
            " GROUP BY c.name",
        ],
    ),
    "a function that returns several rows": (
        [f"{KEY}, generate_series(1, 2) AS n FROM shop.orders o"],
        [],
    ),
    "`now()`, `'today'`, `random()`, and what else may change without a change of a row": (
        [
            *(f"{KEY}, {what} AS x FROM shop.orders o" for what in ("now()", "'now'::timestamp", "random()", "user")),
            f"{KEY}, age(o.created_at) AS x FROM shop.orders o",
            f"{ORDERS} WHERE o.created_at > now() - interval '1 day'",
        ],
        [f"{KEY}, o.created_at::date AS day FROM shop.orders o"],
    ),
    "`string_agg`, `array_agg` and the like without ORDER BY": (
        [
            f"SELECT o.status, {what} AS x FROM shop.orders o GROUP BY o.status"
            for what in ("string_agg(o.id::text, ',')", "array_agg(o.id)", "json_agg(o.id)", "json_object_agg(o.id, 1)")
        ],
        [
            f"SELECT o.status, {what} AS x FROM shop.orders o GROUP BY o.status"
            for what in ("string_agg(o.id::text, ',' ORDER BY o.id)", "array_agg(o.id ORDER BY o.order_no)")
        ],
    ),
    "a table that is not captured, or a view": (
        ["SELECT x.id FROM shop.unknown x", "SELECT w.order_no, w.line_no FROM dwd.lines_wide w"],
        [],
    ),
}

ACCEPTED = [
    *(view["sql"] for view in EXAMPLE["sink"]["views"].values()),
    "SELECT a.id, b.total FROM shop.orders a LEFT JOIN shop.orders b ON b.order_no = a.customer_id",
    "SELECT o.status, count(*) FILTER (WHERE o.total > 9) AS n, count(DISTINCT o.customer_id) AS customers,"
    " sum(o.total::real::numeric) AS total FROM shop.orders o GROUP BY o.status HAVING count(*) > 1",
]


def page() -> str:
    return (DOCS / "views.md").read_text(encoding="utf-8")


def test_the_pages_show_the_example() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", page(), re.DOTALL)
    assert yaml.safe_load(blocks[0]) == EXAMPLE
    quickstart = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n  views:\n(.*?)```", quickstart, re.DOTALL)
    assert shown in (DOCS / "examples" / "shop_views.yaml").read_text(encoding="utf-8")


def test_the_page_names_what_is_refused() -> None:
    table = page().partition("| refused | write instead |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()] == list(REFUSED)


@pytest.fixture(scope="module")
def check(
    source_server: PostgresServer, target_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], None]]:
    """Return a function that lets the sink check a SELECT over the shop."""
    name = "view_examples"
    for server in (source_server, target_server):
        create_database(server, name)
    databases = Databases(source_server.dsn(name), target_server.dsn(name))
    pipeline = PipelineUnderTest(tmp_path_factory.mktemp(name), databases, ["shop.*"]).pipeline
    with psycopg.connect(databases.source) as connection:
        shop.create_schema(connection)
    commands.provision(pipeline)
    targets = {target.table.label: target for target in existing_record(pipeline).targets}

    def checked(select: str) -> None:
        with connected(databases.target, writes=True) as connection:
            connection.autocommit = False
            checked_view(connection, ViewSettings("dwd", "example", select), targets)

    yield checked
    commands.drop(pipeline)
    for server in (source_server, target_server):
        drop_database(server, name)


@pytest.mark.parametrize("row", REFUSED)
def test_what_the_page_calls_refused_is_refused(row: str, check: Callable[[str], None]) -> None:
    refused, instead = REFUSED[row]
    for select in refused:
        with pytest.raises(ConfigError):
            check(select)
    for select in instead:
        check(select)


@pytest.mark.parametrize("select", ACCEPTED)
def test_what_the_page_allows_is_accepted(select: str, check: Callable[[str], None]) -> None:
    check(select)
