"""Fixtures of the tests with a real Airflow, which runs as long as the tests."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.airflow.browser import CHROMIUM, Browser
from tests.airflow.client import Client
from tests.airflow.server import AirflowUnderTest

_running: list[AirflowUnderTest] = []


@pytest.fixture(scope="package")
def airflow(server_directory: Path) -> Iterator[AirflowUnderTest]:
    """Run the Airflow, started by the first test that needs it."""
    airflow = AirflowUnderTest(server_directory / "airflow")
    _running.append(airflow)
    try:
        airflow.start()
        yield airflow
    finally:
        _running.remove(airflow)
        airflow.stop()


@pytest.fixture(scope="package")
def client(airflow: AirflowUnderTest) -> Client:
    """Return its REST API."""
    return airflow.client


@pytest.fixture(scope="module")
def chromium(airflow: AirflowUnderTest) -> Iterator[Browser]:
    """Run the browser of a module; one for all modules would leave its event loop to tests that have their own."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Browser(chromium, airflow.stack.base_url)
        chromium.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Return the browser, and check that its console shows no errors during the test."""
    yield chromium
    complaints, chromium.complaints = chromium.complaints, []
    assert complaints == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of Airflow's log with a test that fails."""
    report = yield
    if report.failed:
        report.sections += [("log of Airflow", airflow.stack.log_tail()) for airflow in _running]
    return report
