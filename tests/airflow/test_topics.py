"""A pipeline over topics in a real Airflow, with the same Dags, connections, page and sensors as any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from local_servers.kafka import KafkaServer
from tests.airflow.browser import Browser
from tests.airflow.client import Client
from tests.airflow.server import AirflowUnderTest
from tests.conftest import Databases
from tests.support.airflow_connections import connect
from tests.support.pipelines import UNHURRIED
from tests.support.topic_queries import CLICKS, SUMS
from tests.support.topics import TopicsPipeline, moments

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.timeout(1800)]

COPY, VERIFY, DROP = "cdc_pipeline", "cdc_verify", "cdc_drop"


@pytest.fixture
def pipeline(
    airflow: AirflowUnderTest,
    client: Client,
    databases: Databases,
    kafka: KafkaServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TopicsPipeline]:
    """Return a pipeline of windows of clicks, whose cluster's address only a connection of Airflow contains."""
    pipeline = TopicsPipeline(tmp_path, databases, kafka, CLICKS, **SUMS)
    name, uri = "clicks_kafka", f"kafka://{kafka.brokers}"
    monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", uri)  # for this process; Airflow has its own variables
    del pipeline.document["source"]["brokers"]
    pipeline.change(source={"conn_id": name}, stream=UNHURRIED)
    with ExitStack() as ended:
        connect(client, ended, name, uri)
        shown = airflow.pipelines / "topics.yaml"
        shown.symlink_to(pipeline.file)
        ended.callback(shown.unlink)
        yield pipeline


@pytest.mark.thorough
def test_topics_are_read_and_compared_and_shown(
    airflow: AirflowUnderTest, client: Client, browser: Browser, pipeline: TopicsPipeline
) -> None:
    for start in (0, 4):
        pipeline.send(*({"id": key, "at": at, "value": 1} for at in moments([start, start + 1]) for key in "ab"))
    given = {"pipeline": str(pipeline.file)}
    copied = client.trigger(COPY, given | {"until": "caught-up", "groups": 1})
    airflow.succeed(COPY, copied)
    assert {client.state(COPY, copied, task) for task in ("provision", "stream", "verify")} == {"success"}
    assert client.state(COPY, copied, "slot_progress") == "skipped"
    assert pipeline.target_rows("SELECT id, sum(total) FROM t GROUP BY 1 ORDER BY 1") == [("a", 4), ("b", 4)]
    with browser.look(f"plugin/cdc?pipeline={pipeline.name}") as page:
        page.get_by_text(pipeline.topic).first.wait_for()
        page.get_by_text("messages not read").wait_for()
        page.get_by_text("idle", exact=True).first.wait_for()

    pipeline.target("UPDATE t SET total = 9 WHERE id = 'b'")
    compared = client.trigger(VERIFY, given)
    airflow.await_state(VERIFY, compared, "verify", "failed")

    dropped = client.trigger(DROP, given)
    airflow.answer(DROP, dropped, "Approve")
    airflow.succeed(DROP, dropped)
    assert not pipeline.state.exists()
