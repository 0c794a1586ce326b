"""Dags of the repository in a real Airflow, used like a user does."""

from __future__ import annotations

import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from tests.airflow.client import Client
from tests.airflow.server import SECONDS, AirflowUnderTest

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1800)]

DAG = "cdc_pipeline"

SQUARES = """
from airflow.sdk import dag, task

@dag(params={"count": 1})
def squares():
    @task
    def numbers(params=None):
        return list(range(params["count"]))

    @task
    def square(number):
        if number == 2:
            raise ValueError("no two")
        return number * number

    square.expand(number=numbers())

squares()
"""


def test_it_runs_a_dag_and_shows_why_it_failed(airflow: AirflowUnderTest, client: Client) -> None:
    airflow.add_dag("squares", SQUARES)
    run = client.trigger("squares", {"count": 3})

    assert client.wait("squares", run, SECONDS) == client.run_state("squares", run) == "failed"
    assert client.states("squares", run) == {
        "numbers": "success",
        "square[0]": "success",
        "square[1]": "success",
        "square[2]": "failed",
    }
    assert "ValueError: no two" in client.failures("squares", run)
    assert "Returned value was: [0, 1, 2]" in client.logs("squares", run, "numbers")


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"until": "yesterday"}, ["until", "'yesterday' does not match"]),
        ({"groups": 0}, ["groups", "0 is less than the minimum of 1"]),
        ({"pipeline": ""}, ["pipeline", "should be non-empty"]),
    ],
)
def test_bad_params_are_refused(client: Client, conf: dict[str, object], words: list[str]) -> None:
    client.await_dag(DAG)
    answer = client.request("POST", f"/dags/{DAG}/dagRuns", json={"logical_date": None, "conf": conf})

    assert answer.status_code == 400, answer.text
    assert all(word in answer.json()["detail"] for word in words), answer.text


def test_a_component_that_is_killed_can_be_started_again(airflow: AirflowUnderTest) -> None:
    before = airflow.stack.component("triggerer")
    airflow.kill("triggerer")
    assert airflow.stack.component("triggerer") is None

    airflow.stack.restart("triggerer")

    assert await_condition(lambda: airflow.stack.component("triggerer") not in (before, None), SECONDS, 0.5)
