"""Airflow's own forms with the fields of this provider, filled in by a user in Chromium.

``AIRFLOW_CDC_IMAGES=docs/images`` recreates the picture of a run for the documentation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeat
from local_servers.airflow_client import FINAL_STATES
from tests.airflow.browser import LOOKS, Browser
from tests.airflow.client import Client
from tests.airflow.server import HISTORY_SERVER, POLL, SECONDS, AirflowUnderTest
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1800)]

DAG, BACKFILL, VERIFY = "cdc_pipeline", "cdc_backfill", "cdc_verify"
IMAGES = os.environ.get("AIRFLOW_CDC_IMAGES")


def open_form(page: Any, fields: Mapping[str, tuple[str, str]]) -> Any:
    """Open the form of a Dag, and wait until it shows fields with these titles, names and values."""
    page.get_by_role("button", name="Trigger").first.click()
    form = page.get_by_role("dialog")
    for title, (name, value) in fields.items():
        form.locator("label", has_text=title).first.wait_for()  # which is already expanded
        assert form.locator(f"[name=element_{name}]").input_value() == value
    return form


def submit(form: Any) -> None:
    form.get_by_role("contentinfo").get_by_role("button", name="Trigger").click()


@pytest.mark.parametrize(("width", "mode"), LOOKS[::3])
def test_a_connection_is_made_in_its_form_and_tested(
    browser: Browser, client: Client, databases: Databases, width: int, mode: str
) -> None:
    server = urlsplit(databases.source)
    given = {"host": server.hostname, "login": server.username, "port": server.port, "schema": server.path[1:]}
    try:
        with browser.look("connections", width, mode) as page:
            page.get_by_role("button", name="Add Connection").click()
            form, row = page.get_by_role("dialog"), page.get_by_role("row", name="form_pg")
            form.get_by_label("Connection ID").fill("form_pg")
            form.get_by_role("combobox", name="Connection Type").fill("Postgres CDC")
            page.get_by_role("option", name="Postgres CDC").click()
            for label, hint in (
                ("Host", "db.example.com"),
                ("Role", "cdc, for a source with REPLICATION"),
                ("Database", "shop"),
            ):
                assert form.get_by_label(label, exact=True).get_attribute("placeholder") == hint
            for name, value in given.items():
                form.locator(f"[name={name}]").fill(str(value))
            form.get_by_role("button", name="Extra Fields", exact=True).click()
            for label in ("Used as", "SSL mode", "SSL root certificate", "Publication to test"):
                form.locator("label", has_text=label).wait_for()
            form.get_by_text("libpq's default, prefer").wait_for()
            form.locator("[name=element_publication]").fill("publication_of_form")
            form.get_by_role("button", name="Save").click()
            row.get_by_role("button", name="Test Connection").click()
            page.get_by_text(re.compile("The source is Postgres.*publication_of_form")).wait_for()
            row.get_by_role("button", name="Edit Connection").click()
            form.locator("[name=port]").fill("1")
            form.get_by_role("button", name="Save").click()
            form.wait_for(state="detached")
            row.get_by_role("button", name="Test Connection").click()
            page.get_by_text("Connection refused. Check that the server runs").wait_for()
    finally:
        client.request("DELETE", "/connections/form_pg")


@pytest.mark.parametrize(("width", "mode"), LOOKS[::3])
def test_the_form_of_a_backfill_proposes_and_refuses(browser: Browser, client: Client, width: int, mode: str) -> None:
    client.await_dag(BACKFILL)
    before = client.runs(BACKFILL)
    with browser.look(f"dags/{BACKFILL}", width, mode) as page:
        fields = {
            "Time column": ("time_column", "created_at"),
            "First key": ("key_from", ""),
            "End before key": ("key_to", ""),
            "Rows": ("rows", "time"),
            "Tables": ("tables", ""),
        }
        form = open_form(page, fields)
        form.get_by_text("Rows of a time interval", exact=True).wait_for()  # the form in which a time is shown
        form.locator("[name=element_tables]").fill("orders")
        submit(form)
        form.get_by_text("Invalid input for param tables: 'orders' does not match").wait_for()
    browser.forgive("400 (Bad Request)")
    assert client.runs(BACKFILL).keys() == before.keys()


@pytest.fixture
def pipeline(airflow: AirflowUnderTest, databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    """Create a shop, whose file is in the folder of the page."""
    tables = ["shop.customers", "shop.orders"]
    spark = {"conf": {"spark.ui.enabled": "true"}}
    pipeline = PipelineUnderTest(tmp_path, databases, tables, snapshot={"chunk_rows": 500})
    pipeline.change(spark={"conf": pipeline.document["spark"]["conf"] | spark["conf"]})
    pipeline.source("CREATE SCHEMA shop")
    for number, table in enumerate(tables, 1):
        pipeline.source(
            f"CREATE TABLE {table} (id int PRIMARY KEY, body text)",
            f"INSERT INTO {table} SELECT n, 'row ' || n FROM generate_series(1, {number * 1000}) n",
        )
    shown = airflow.pipelines / "shown.yaml"
    shown.symlink_to(pipeline.file)
    yield pipeline
    shown.unlink()


@pytest.mark.spark
def test_a_pipeline_is_triggered_from_its_form_and_paused_and_verified_on_the_page(
    airflow: AirflowUnderTest, browser: Browser, client: Client, pipeline: PipelineUnderTest
) -> None:
    state = State(pipeline.pipeline.state)
    for dag in (DAG, VERIFY):
        client.await_dag(dag)
    client.pause(DAG)
    client.pause(VERIFY, False)

    def new_run(dag: str, before: Set[str]) -> str:
        found: list[str] = []

        def begun() -> bool:
            found[:] = client.runs(dag).keys() - before
            return bool(found)

        assert await_condition(begun, SECONDS, POLL), dag
        return found[0]

    def streams() -> bool:
        beat = read_heartbeat(state, "stream")
        return beat is not None and beat.alive and beat.ui is not None and "changes" in beat.progress

    def slot_moved() -> bool:
        pipeline.source("SELECT pg_log_standby_snapshot()")  # from entry to entry of this kind
        return client.state(DAG, run, "slot_progress") == "success"

    before = client.runs(DAG).keys()
    with browser.look(f"dags/{DAG}") as page:
        fields = {
            "Pipeline file": ("pipeline", str(airflow.scheduled)),
            "Stream until": ("until", "caught up"),
            "Stream until LSN": ("until_lsn", ""),
            "Snapshot groups": ("groups", "2"),
        }
        form = open_form(page, fields)
        form.locator("[name=element_until_lsn]").fill("yesterday")
        submit(form)
        form.get_by_text("Invalid input for param until_lsn: 'yesterday' does not match").wait_for()
        browser.forgive("400 (Bad Request)")
        form.locator("[name=element_until_lsn]").fill("")
        form.locator("#element_until").click()
        page.get_by_role("option", name="forever: until a user stops it").click()
        form.locator("[name=element_pipeline]").fill(str(airflow.pipelines / "shown.yaml"))
        if not IMAGES:
            form.locator("[name=element_groups]").fill("1")
        submit(form)  # this also unpauses the Dag, as proposed
        form.wait_for(state="detached")
    run = new_run(DAG, before)
    assert await_condition(streams, SECONDS, POLL), client.states(DAG, run)

    with browser.look(f"dags/{DAG}/runs/{run}/tasks/stream/details") as page:
        page.get_by_role("link", name="Spark UI or history server").click()
        page.get_by_text("airflow-cdc").first.wait_for()
        beat = read_heartbeat(state, "stream")
        assert beat is not None
        assert page.url.startswith(str(beat.ui))
    assert await_condition(slot_moved, SECONDS, POLL), client.states(DAG, run)  # without a stream it would not
    with browser.look(f"plugin/cdc?pipeline={pipeline.name}") as page:
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("alertdialog").get_by_role("button", name="Pause").click()
        page.get_by_text(f"Asked to stop: stream. Dag {DAG} is paused.").wait_for()
        page.get_by_text("stopped", exact=True).first.wait_for()
        # The rest of the run waits.
        assert client.state(DAG, run, "verify") is None
        client.pause(DAG, False)
        airflow.succeed(DAG, run)
        assert client.xcom(DAG, run, "verify")["equal"]
        for each, found in client.runs(VERIFY).items():
            if found not in FINAL_STATES:  # the schedule's run, with a file that does not exist, would come first
                client.mark_run(VERIFY, each, "failed")
        before = client.runs(VERIFY).keys()
        page.get_by_role("button", name="Verify").click()
        page.get_by_role("alertdialog").get_by_role("button", name="Verify").click()
        page.get_by_text(f"Dag {VERIFY} has been triggered.").wait_for()
    comparison = new_run(VERIFY, before)
    airflow.succeed(VERIFY, comparison)
    assert client.xcom(VERIFY, comparison, "verify")["equal"]

    links = client.call("GET", f"/dags/{DAG}/dagRuns/{run}/taskInstances/stream/links")["extra_links"]
    beat = read_heartbeat(state, "stream")
    assert beat is not None
    assert (
        client.visit(links["Spark UI or history server"]).headers["location"]
        == f"{HISTORY_SERVER}/history/{beat.application}/"
    )
    if IMAGES:
        with browser.look(f"dags/{DAG}/runs/{run}", 1440, height=1040) as page:
            page.get_by_text("preflight").nth(1).wait_for()
            page.get_by_text("shop.orders").first.wait_for()
            page.screenshot(path=f"{IMAGES}/dag-run-1440-light.png")
