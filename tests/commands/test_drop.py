"""``drop`` if the source does not answer; the tests of the parts cover what it removes otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from local_servers.process import find_free_port
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest


def test_a_source_that_is_gone(
    databases: Databases, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A slot is left behind only on request, and with a message, because its server may come back."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)")
    pipeline.provision()
    user, _, database = databases.pipeline_source.partition("@")
    pipeline.change(source={"dsn": f"{user}@127.0.0.1:{find_free_port()}/{database.partition('/')[2]}"})
    drop = ["drop", "--pipeline", str(pipeline.file), "--yes", "--json"]

    assert cli.main(drop) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], "--source-gone" in error["solution"]) == ("ConnectionFailed", True)
    assert pipeline.record.targets

    assert cli.main([*drop, "--source-gone"]) == 0
    left = json.loads(capsys.readouterr().out)["left"]
    assert len(left) == 2
    # Not its text: once Spark has logged in this process, its loggers set the handler's format to JSON.
    said = "\n".join(caplog.messages)
    assert "the slot keeps its log UNTIL ITS DISK IS FULL" in said
    assert all(f"{statement};" in said for statement in left)
    assert sink_of(pipeline.pipeline).record() is None
    assert not pipeline.state.exists()
    assert cli.main([*drop, "--source-gone"]) == 0
    assert json.loads(capsys.readouterr().out) == {"dropped": pipeline.name, "left": []}

    pipeline.source(*left)
    found = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    assert pipeline.source_rows(f"{found} UNION ALL SELECT pubname FROM pg_publication") == []
