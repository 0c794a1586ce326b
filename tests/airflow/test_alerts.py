"""The documented alerts of a pipeline by mail, and events of an asset while its stream runs, in a real Airflow."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from tests.airflow.client import Client
from tests.airflow.server import POLL, SECONDS, AirflowUnderTest
from tests.conftest import Databases
from tests.support.airflow_connections import connect
from tests.support.airflow_support import ROOT
from tests.support.pipelines import UNHURRIED, PipelineUnderTest
from tests.support.smtp_server import Mailbox, mailbox

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.timeout(1800)]

EXAMPLE = ROOT / "docs" / "examples" / "shop_alerts_dag.py"
# The file is next to the Dag. The limits are ones that are exceeded at once.
REPLACED = {
    "    PIPELINE,\n": '    "alerts.yaml",\n',
    "below_seconds=120, timeout=300": "below_bytes=1, timeout=3",
    'budget="10GiB"': "budget=1",
}
REPORT = """
from airflow.sdk import task

from airflow_cdc_provider import applied_lsn, table_asset

COPY = table_asset("NAME", "public.t", watch=PIPELINE, interval=1)

with DAG("alerts_report", schedule=[COPY], max_active_runs=1):

    @task(inlets=[COPY])
    def report(inlet_events=None):
        return applied_lsn(inlet_events[COPY][-1])

    report()
"""


@pytest.fixture
def mails(client: Client, databases: Databases) -> Iterator[Mailbox]:
    """Run a mail server, and create the connections of the example."""
    with mailbox() as server, ExitStack() as ended:
        connect(client, ended, "smtp_default", f"smtp://127.0.0.1:{server.port}?disable_tls=true&disable_ssl=true")
        connect(client, ended, "shop_pg", databases.source)
        yield server


def test_what_needs_attention_is_mailed_and_a_running_stream_starts_other_dags(
    airflow: AirflowUnderTest, client: Client, databases: Databases, tmp_path: Path, mails: Mailbox
) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], stream=UNHURRIED)
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, body text)",
        "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 200) n",
    )
    pipeline.provision()
    pipeline.copy()
    shutil.copy(pipeline.file, airflow.dags / "alerts.yaml")
    dags = re.sub('schedule="[^"]+"', "schedule=None", EXAMPLE.read_text()) + REPORT.replace("NAME", pipeline.name)
    for old, new in REPLACED.items():
        assert old in dags, old
        dags = dags.replace(old, new)
    airflow.add_dag("alerts", dags.replace("/opt/airflow/pipelines/shop.yaml", str(pipeline.file)))
    copy = f"cdc_{pipeline.name}"
    for dag_id in (copy, "shop_lag", "shop_slots", "shop_verify", "alerts_report"):
        client.await_dag(dag_id)

    def mail(subject: str) -> str:
        """Return the text of the mail with a subject, once it has arrived."""
        assert await_condition(lambda: subject in mails.texts(), SECONDS, POLL), mails.texts()
        return mails.texts()[subject]

    running = client.trigger(copy)
    airflow.await_state(copy, running, "stream", "deferred")
    before = pipeline.marker()
    pipeline.source("UPDATE public.t SET body = 'new' WHERE id <= 100")

    def reported() -> list[int]:
        over = [run for run, state in client.runs("alerts_report").items() if state == "success"]
        return [parse_lsn(client.xcom("alerts_report", run, "report")) for run in over]

    assert await_condition(lambda: any(lsn > before for lsn in reported()), SECONDS, POLL), reported()
    assert client.state(copy, running, "stream") == "deferred"

    pipeline.target("UPDATE public.t SET body = 'damaged' WHERE id = 150")
    client.trigger("shop_slots")
    client.trigger("shop_verify")
    assert "different id=150" in mail("shop_verify.verify failed")
    assert f"slot '{pipeline.pipeline.source.slot}' retains" in mail("Slots of the shop")

    pipeline.run("stop")
    airflow.succeed(copy, running)
    assert running in mail(f"The stream of {copy} was stopped")
    pipeline.marker()
    client.trigger("shop_lag")
    assert "behind; awaited: less than 1 B" in mail("shop_lag.lag failed")
    assert "The end of the job's output" in client.logs(copy, running, "stream")
