"""The page CDC in a real Chromium, served by a real Airflow, with pipelines of real jobs.

``AIRFLOW_CDC_IMAGES=docs/images`` recreates the pictures of the documentation.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import yaml

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.table_operations import TableOperations
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.record_copy import write_record_copy
from airflow_cdc_provider.engine.runs.run_errors import record_error
from airflow_cdc_provider.engine.runs.table_activity import TableActivity
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, write_heartbeat
from airflow_cdc_provider.engine.state.history import read_history
from tests.airflow.browser import LOOKS, WIDTHS, Browser, pale_texts, tab_to
from tests.airflow.client import Client
from tests.airflow.server import SECONDS, AirflowUnderTest
from tests.conftest import Databases
from tests.support.databases import execute
from tests.support.pipelines import PipelineUnderTest

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1800)]

VIEWS = {
    "dwd.orders_wide": {
        "sql": "SELECT o.id, o.body, c.body AS customer FROM shop.orders o LEFT JOIN shop.customers c ON c.id = o.id"
    },
    "dws.orders_by_body": {
        "sql": "SELECT body, count(*) AS orders FROM shop.orders GROUP BY body",
        "refresh": "10 seconds",
    },
}

DAG = """
from airflow.sdk import DAG
from airflow.providers.standard.operators.empty import EmptyOperator

with DAG("cdc_{name}", tags=["cdc", "cdc:{name}"], schedule=None):
    EmptyOperator(task_id="nothing")
"""

# Elements that show a scrollbar, or truncate their contents, in the direction of reading.
OVERFLOWING = """() => [document.documentElement, ...document.querySelectorAll("[data-cdc], [data-cdc] *")]
    .filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0
        && ["auto", "scroll", "visible"].includes(getComputedStyle(e).overflowX)
        && !e.closest("svg") && getComputedStyle(e).display !== "inline")
    .map((e) => `${e.tagName} ${e.textContent.slice(0, 60)}: ${e.scrollWidth} in ${e.clientWidth}`)"""


@pytest.fixture(autouse=True)
def no_pipelines(airflow: AirflowUnderTest) -> Iterator[None]:
    """Remove all pipeline files."""
    yield
    shutil.rmtree(airflow.pipelines)
    airflow.pipelines.mkdir()


@pytest.fixture
def shop(airflow: AirflowUnderTest, databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    """Return a pipeline that has been copied; its file is in the folder of the page, as ``shop``."""
    tables = ["shop.customers", "shop.orders", "shop.order_lines"]
    stream = {"heartbeat": "1 second", "max_retained_wal": "64MiB"}
    slot = f"airflow_cdc_{databases.source.rpartition('/')[2]}"  # those of concurrent tests need different names
    sections = {"snapshot": {"chunk_rows": 1000}, "stream": stream, "sink": {"views": VIEWS}, "source": {"slot": slot}}
    pipeline = PipelineUnderTest(tmp_path, databases, tables, pipeline="shop", **sections)
    pipeline.source("CREATE SCHEMA shop")
    for number, table in enumerate(tables, 1):
        pipeline.source(
            f"CREATE TABLE {table} (id int PRIMARY KEY, body text)",
            f"INSERT INTO {table} SELECT n, repeat('x', 80) FROM generate_series(1, {number * 8000}) n",
        )
    pipeline.provision()
    pipeline.copy_tables()
    write_record_copy(pipeline.pipeline, State(pipeline.pipeline.state), pipeline.record)
    shutil.copy(pipeline.file, airflow.pipelines / "shop.yaml")
    yield pipeline
    pipeline.end_commands()


@contextmanager
def customers(dsn: str) -> Iterator[None]:
    """Run customers who buy at varying rates."""
    over = threading.Event()

    def buy() -> None:
        for n in range(10**6):
            first = 10**6 + 300 * n
            query = f"SELECT n, repeat('x', 80) FROM generate_series({first}, {first + n * 37 % 290}) n"
            execute(dsn, f"INSERT INTO shop.orders {query}")
            if over.wait(0.1):
                return

    buyer = threading.Thread(target=buy, daemon=True)
    buyer.start()
    yield
    over.set()
    buyer.join()


def assert_fits(page: Any) -> None:
    """Check that no element is wider than its container, or than the window, once the page has been laid out."""
    assert await_condition(lambda: page.evaluate(OVERFLOWING) == [], 10), page.evaluate(OVERFLOWING)


def test_nothing_yet(browser: Browser, client: Client) -> None:
    client.await_dag("cdc_pipeline")
    with browser.look("plugin/cdc", *LOOKS[-1]) as page:
        page.get_by_text("No pipelines yet").wait_for()
        assert_fits(page)
    with browser.look("dags/cdc_pipeline/plugin/cdc-pipelines") as page:
        page.get_by_text("This Dag runs no pipeline.").wait_for()
        page.get_by_role("link", name="CDC", exact=True).wait_for()
        page.get_by_role("link", name="All pipelines").click()
        page.get_by_text("No pipelines yet").wait_for()
        assert_fits(page)
    with browser.look("") as page:
        page.get_by_text("Browse").click()
        page.get_by_role("menuitem", name="CDC").click()
        page.get_by_text("No pipelines yet").wait_for()


@pytest.mark.spark
def test_one_pipeline_is_shown_and_stopped_and_resumed(
    airflow: AirflowUnderTest, browser: Browser, client: Client, shop: PipelineUnderTest
) -> None:
    airflow.add_dag("cdc_shop", DAG.format(name="shop"))
    client.await_dag("cdc_shop")
    images = os.environ.get("AIRFLOW_CDC_IMAGES")
    stream = shop.start("stream")
    with customers(shop.databases.source):
        samples = 14 if images else 3
        state = State(shop.pipeline.state)
        stream.until(lambda: len(read_history(state)["samples"]) >= samples, "samples", SECONDS)
        # Each color mode is loaded at one width, and then seen at the other one too.
        for first, mode in LOOKS[::3]:
            with browser.look("plugin/cdc", first, mode) as page:
                for width in sorted(WIDTHS, key=lambda width: width != first):
                    page.set_viewport_size({"width": width, "height": 1440 if width > 400 else 1600})
                    for text in ("live", "of 64.0 MiB, then warn", "shop.order_lines", "Who did what", "None."):
                        page.get_by_text(text).first.wait_for()
                    views = page.get_by_role("region", name="Views")
                    for text in ("dwd.orders_wide", "up-to-date", " ms each", "refreshed every 10 s"):
                        views.get_by_text(text).first.wait_for()
                    page.get_by_role("img", name="Retained log: ").wait_for()
                    assert not page.get_by_text("End LSN").is_visible()
                    page.get_by_role("button", name="Stop").wait_for()
                    assert_fits(page)
                    assert pale_texts(page) == []
                    if images and (width, mode) != (390, "dark"):
                        page.screenshot(path=f"{images}/cdc-page-{width}-{mode}.png")
        with browser.look("dags/cdc_shop/plugin/cdc-pipelines") as page:
            page.get_by_role("heading", name="shop", exact=True).wait_for()
            assert_fits(page)
        with browser.look("plugin/cdc?pipeline=shop") as page:
            page.get_by_text("Batches, positions and processes").click()
            page.get_by_text("End LSN").wait_for()
            page.get_by_role("link", name="shop.orders").click()
            page.get_by_role("img", name="shop.orders: 16 of 16 chunks copied").wait_for()
            for text in ("integer not null", "key", "dwd.orders_wide", "dws.orders_by_body"):
                page.get_by_text(text, exact=True).first.wait_for()
            page.get_by_role("button", name="Read again").click()
            page.get_by_role("alertdialog").get_by_text("between two units").wait_for()
            page.get_by_role("alertdialog").get_by_role("button", name="Read again").click()
            page.get_by_text("Dag cdc_resnapshot has been triggered.").wait_for()
            page.get_by_text("rows were read again").wait_for()
            page.set_viewport_size({"width": WIDTHS[1], "height": 1600})
            assert_fits(page)
            assert pale_texts(page) == []
            if images:
                page.set_viewport_size({"width": WIDTHS[0], "height": 900})
                page.screenshot(path=f"{images}/cdc-table-{WIDTHS[0]}-light.png")
    with browser.look("plugin/cdc?pipeline=shop") as page:
        page.get_by_text("read shop.orders again").wait_for()
        tab_to(page, "Stop")
        page.keyboard.press("Enter")
        page.get_by_role("alertdialog").wait_for()
        tab_to(page, "Stop")
        page.keyboard.press("Enter")
        page.get_by_text("Asked to stop: stream.").wait_for()
        page.get_by_text(re.compile("stopped by .")).wait_for()
        page.get_by_role("button", name="Resume").click()
        page.get_by_role("alertdialog").get_by_role("button", name="Resume").click()
        page.get_by_role("link", name="See the run").click()
        page.wait_for_url("**/dags/cdc_shop/runs/**")
    assert stream.wait().code == 0
    assert len(client.runs("cdc_shop")) == 1


def test_five_hundred_tables(airflow: AirflowUnderTest, browser: Browser, client: Client) -> None:
    client.await_dag("cdc_pipeline")
    document = {"pipeline": "wide", "source": {"conn_id": "a", "tables": ["a.*"]}, "sink": {"conn_id": "b"}}
    state = State(str(airflow.directory / "wide"))
    (airflow.pipelines / "wide.yaml").write_text(yaml.safe_dump(document | {"state": state.url}), encoding="utf-8")
    tables = [f"a.table_{number:03}" for number in range(500)]
    chunk = {"index": 0, "lower": None, "upper": None, "rows": 7}
    chunks = [chunk | {"table": table, "finished": table != "a.table_007"} for table in tables]
    state.write("ledger.json", {"epoch": 1, "sinks": [], "chunks": chunks})
    activity = TableActivity()
    activity.add({table: TableOperations(number, 0, 0, time.time()) for number, table in enumerate(tables)})
    progress = {"activity": activity.as_dict(), "lag_seconds": 0.0}
    write_heartbeat(state, Heartbeat(Owner.this(), "stream", 1, time.time(), True, progress))
    error = ConfigError("a.table_042 has a column that is too wide", "Make it narrower.")
    record_error(state, "stream", error)
    for width in WIDTHS:
        with browser.look("plugin/cdc?pipeline=wide", width) as page:
            rows = page.get_by_role("link", name="a.table_")
            rows.first.wait_for()
            assert rows.first.inner_text() == "a.table_042"  # the one that the error names
            assert pale_texts(page) == []
            page.get_by_role("button", name="Show all 500 tables").click()
            assert await_condition(lambda rows=rows: rows.count() == 500, SECONDS)
            assert_fits(page)
            page.get_by_label("Search tables").fill("_17")
            assert await_condition(lambda rows=rows: rows.count() == 10, SECONDS)
            if width > 400:
                tab_to(page, "Inserts in total")
                page.keyboard.press("Enter")
                page.locator("th[aria-sort=descending]", has_text="Inserts ↓").wait_for()
                assert rows.first.inner_text() == "a.table_179"
                tab_to(page, "a.table_179")
                page.keyboard.press("Enter")
                page.get_by_role("heading", name="a.table_179").wait_for()


@pytest.mark.thorough
def test_two_hundred_pipelines(airflow: AirflowUnderTest, browser: Browser, shop: PipelineUnderTest) -> None:
    shop.apply()
    document = yaml.safe_load((airflow.pipelines / "shop.yaml").read_text())
    for number in range(199):
        state = shop.directory / f"state{number}"
        if number % 3:
            shutil.copytree(shop.state, state, ignore=shutil.ignore_patterns("checkpoint"))
        text = yaml.safe_dump(document | {"pipeline": f"pipeline_{number}", "state": f"file://{state}"})
        (airflow.pipelines / f"pipeline_{number}.yaml").write_text(text if number else "pipeline: 1")
    for width, mode in LOOKS:
        with browser.look("plugin/cdc", width, mode) as page:
            page.get_by_role("button", name="All 200").wait_for()
            assert page.get_by_role("link", name="pipeline_").count() == 199
            assert_fits(page)
            page.get_by_label("Search pipelines").fill("_17")
            page.get_by_role("link", name="pipeline_170").wait_for()
            assert page.get_by_role("link", name="pipeline_").count() == 11
            page.get_by_label("Search pipelines").fill("")
            page.get_by_role("button", name="attention 1").click()
            page.get_by_role("link", name="pipeline_0").click()
            page.get_by_text("is not valid").wait_for()
            page.get_by_role("link", name="All pipelines").click()
            page.get_by_role("button", name="All 200").wait_for()


def test_roles_see_what_airflow_lets_them(airflow: AirflowUnderTest, client: Client) -> None:
    client.await_dag("cdc_pipeline")
    document = {"pipeline": "shop", "source": {"conn_id": "a", "tables": ["a.b"]}, "sink": {"conn_id": "b"}}
    text = yaml.safe_dump(document | {"state": str(airflow.directory / "nowhere")})
    (airflow.pipelines / "shop.yaml").write_text(text, encoding="utf-8")
    claims = jwt.decode(
        httpx.get(f"{airflow.stack.base_url}/auth/token", trust_env=False).json()["access_token"],
        options={"verify_signature": False},
    )
    requests = [
        ("GET", "pipelines"),
        ("GET", "pipelines/shop"),
        ("GET", "pipelines/shop/tables/a.b"),
        ("POST", "pipelines/shop/stop"),
        ("GET", "pipelines/shop/spark/1?application=app-1"),
        ("GET", "pipelines/shop/spark/1?application=../app"),
    ]

    def answers(token: str) -> list[httpx.Response]:
        headers = {"Authorization": f"Bearer {token}"}
        return [
            httpx.request(method, f"{airflow.stack.base_url}/cdc/api/{path}", headers=headers, trust_env=False)
            for method, path in requests
        ]

    def token(role: str | None) -> str:
        return jwt.encode(
            claims | {"sub": "somebody", "role": role},
            airflow.stack._environment["AIRFLOW__API_AUTH__JWT_SECRET"],
            "HS512",
        )

    by_role = {role: answers(token(role)) for role in (None, "viewer", "user")}

    assert {role: [answer.status_code for answer in found] for role, found in by_role.items()} == {
        None: [403, 403, 403, 403, 403, 403],
        "viewer": [200, 200, 404, 403, 307, 422],
        "user": [200, 200, 404, 200, 307, 422],
    }
    assert [answer.status_code for answer in answers("nonsense")] == [403] * 6
    for role, may in (("viewer", False), ("user", True)):
        allowed = by_role[role][1].json()["may"]
        assert (allowed["stop"], allowed["run"]["may_trigger"], allowed["run"]["may_pause"]) == (may, may, may)
