"""The operators: their handling of the engine's results and of Spark jobs."""

from __future__ import annotations

import re
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow_support import connection_json, write_pipeline

# isort: split
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_cdc_provider.engine import commands as engine_commands
from airflow_cdc_provider.engine.core.errors import (
    ConnectionFailed,
    GateClosed,
    SecondWriter,
    ServerNotReady,
    SparkUnusable,
)
from airflow_cdc_provider.engine.core.findings import Finding
from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.run_errors import last_error
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.history import read_history
from airflow_cdc_provider.hooks import spark_job
from airflow_cdc_provider.hooks.progress import progress_line
from airflow_cdc_provider.operators.pipeline import CdcPreflightOperator, CdcProvisionOperator, CdcVerifyOperator
from airflow_cdc_provider.operators.snapshot import CdcPlanOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from tests.support.task_instances import task_instance

pytestmark = pytest.mark.airflow

Commands = Callable[..., Any]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Replace the engine's commands with functions during the test."""

    def install(**functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(engine_commands, name, function)

    return install


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the path of a pipeline file whose connections Airflow knows."""
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", "postgresql://cdc@db/shop")
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", "postgresql://cdc:hidden@dw/dw")
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection_json(conn_type="spark", host="local[1]"))
    return str(write_pipeline(tmp_path))


def fail_with(error: Exception) -> Callable[..., Any]:
    """Return a command that fails."""

    def command(*args: object, **kwargs: object) -> None:
        raise error

    return command


def preflight_finds(monkeypatch: pytest.MonkeyPatch, *found: Finding) -> None:
    monkeypatch.setattr("airflow_cdc_provider.engine.commands.checks.preflight", lambda pipeline: found)


def logged(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the messages that an operator has logged, as they appear on the console."""
    return re.findall(r" \[(?:info|warning|error) *\] (.*?) *\[airflow\S+\] loc=pipeline.py", capsys.readouterr().out)


def test_preflight_lists_and_returns_the_findings(
    monkeypatch: pytest.MonkeyPatch, pipeline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    preflight_finds(
        monkeypatch,
        Finding("wal_level", True, "wal_level is logical."),
        Finding("keep", True, "No limit is set.", warning=True),
    )

    result = CdcPreflightOperator(task_id="t", pipeline=pipeline).execute({})

    assert [finding["check"] for finding in result["findings"]] == ["wal_level", "keep"]
    assert logged(capsys) == ["✓ wal_level is logical.", "! No limit is set."]


def test_preflight_shows_all_failures_with_one_traceback_and_leaves_them_to_the_page(
    monkeypatch: pytest.MonkeyPatch, pipeline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    level = ServerNotReady("wal_level is replica", f"Run: {'word ' * 30}`ALTER SYSTEM SET wal_level = 'logical'`.")
    gone = ConnectionFailed("cannot connect to dw", "Start it.")
    preflight_finds(
        monkeypatch,
        Finding("version", True, "The source is Postgres 17."),
        Finding("sink", False, "cannot connect to dw.", gone),
        Finding("wal_level", False, "wal_level is replica.", level),
    )

    with pytest.raises(AirflowFailException) as caught:  # because one of them needs a person
        CdcPreflightOperator(task_id="t", pipeline=pipeline).execute({})

    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1
    head, *lines = str(caught.value).splitlines()
    assert head == "2 of 3 checks failed."
    assert lines[:3] == ["✗ cannot connect to dw.", "    Start it.", "✗ wal_level is replica."]
    assert len(lines) == 5
    assert all(len(line) <= 110 for line in lines)
    assert logged(capsys) == ["✓ The source is Postgres 17.", *lines]
    left = last_error(State(Pipeline.outline(pipeline).state))
    assert left is not None
    assert (left["kind"], left["message"]) == ("ServerNotReady", "2 of 3 checks failed")


def test_what_a_task_fails_of_stands_in_the_state(commands: Commands, pipeline: str) -> None:
    commands(
        provision=fail_with(GateClosed("the slot is gone", "Resnapshot.")),
        verify=fail_with(ServerNotReady("busy", "Wait.")),
    )
    state = State(Pipeline.outline(pipeline).state)

    for operator in (CdcVerifyOperator, CdcProvisionOperator):
        with pytest.raises(AirflowFailException):
            operator(task_id="t", pipeline=pipeline).execute({})

    told = [(error["part"], error["kind"]) for error in read_history(state)["errors"]]
    left = last_error(state)
    assert told == [("verify", "ServerNotReady"), ("provision", "GateClosed")]
    assert left is not None
    assert left["message"] == "the slot is gone"  # not that of a comparison, on which no run depends


def test_what_another_run_is_in_the_way_of_does_not_touch_its_state(commands: Commands, pipeline: str) -> None:
    commands(provision=fail_with(SecondWriter("another run is alive", "Wait for it.")))

    with pytest.raises(AirflowException):
        CdcProvisionOperator(task_id="t", pipeline=pipeline).execute({})

    assert last_error(State(Pipeline.outline(pipeline).state)) is None


def test_a_connection_that_is_missing_is_told_to_the_page(monkeypatch: pytest.MonkeyPatch, pipeline: str) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_SHOP_PG")

    with pytest.raises(AirflowFailException, match="does not exist"):
        CdcPreflightOperator(task_id="t", pipeline=pipeline).execute({})

    left = last_error(State(Pipeline.outline(pipeline).state))
    assert left is not None
    assert "'shop_pg'" in left["message"]


def test_provision_returns_what_the_engine_returned(commands: Commands, pipeline: str) -> None:
    result = {"epoch": 7, "applied_lsn": "0/1", "tables": ["public.orders"], "chunks": 3, "restart_lsn": "0/0"}
    seen: list[object] = []

    def provision(pipeline: Pipeline, takeover: bool, checked: bool) -> dict[str, object]:
        assert not checked
        seen.append((pipeline.name, takeover))
        return result

    commands(provision=provision)

    assert CdcProvisionOperator(task_id="t", pipeline=pipeline, takeover=True).execute({}) == result
    assert seen == [("shop", True)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServerNotReady("wal_level is replica", "Set wal_level."), AirflowFailException),
        (GateClosed("the slot is gone", "Resnapshot."), AirflowFailException),
        (SecondWriter("another run is alive", "Wait for it."), AirflowException),
    ],
)
def test_an_error_is_retried_only_if_it_says_so(
    commands: Commands, pipeline: str, error: Exception, kind: type[Exception]
) -> None:
    commands(provision=fail_with(error))

    with pytest.raises(AirflowException) as caught:
        CdcProvisionOperator(task_id="t", pipeline=pipeline).execute({})

    assert isinstance(caught.value, AirflowFailException) is (kind is AirflowFailException)
    assert str(caught.value) == f"{error}.\n{error.solution}"  # type: ignore[attr-defined]


def test_a_wrong_pipeline_file_is_not_retried(tmp_path: Path) -> None:
    with pytest.raises(AirflowFailException, match="cannot be read"):
        CdcPreflightOperator(task_id="t", pipeline=str(tmp_path / "none.yaml")).execute({})


def test_plan_takes_a_rendered_number(commands: Commands, pipeline: str) -> None:
    chunks = [{"table": "public.orders", "index": i, "lower": "", "upper": ""} for i in range(3)]
    commands(unfinished=lambda p: chunks)
    with Path(pipeline).open("a") as file:
        file.write("spark: {min_bytes: 0}\n")

    assert len(CdcPlanOperator(task_id="t", pipeline=pipeline, groups="2").execute({})) == 2
    with pytest.raises(AirflowFailException, match="argument groups is 'many'"):
        CdcPlanOperator(task_id="t", pipeline=pipeline, groups="many").execute({})


def test_verify_names_tables_and_keys_that_differ(commands: Commands, pipeline: str) -> None:
    equal = {"table": "public.customers", "source_rows": 4, "target_rows": 4, "equal": True, "differences": []}
    different = {
        "table": "public.orders",
        "source_rows": 20,
        "target_rows": 9,
        "equal": False,
        "differences": [{"key": {"id": i}, "kind": "missing"} for i in range(12)],
    }
    result = {"equal": False, "tables": [equal, different], "live": False, "lag_bytes": 2048}
    commands(verify=lambda p: result)

    with pytest.raises(AirflowFailException) as caught:
        CdcVerifyOperator(task_id="t", pipeline=pipeline).execute({})

    assert "public.orders: 20 rows in the source, 9 in the sink: missing id=0, missing id=1," in str(caught.value)
    assert "missing id=9, and 2 more\n" in str(caught.value)
    assert "No stream is running, and 2.0 KiB of WAL are not applied yet: let a stream catch up" in str(caught.value)
    assert "trigger the Dag cdc_resnapshot with Tables: public.orders;" in str(caught.value)
    assert "`airflow-cdc resnapshot --table public.orders`" in str(caught.value)
    assert "customers" not in str(caught.value)


def test_verify_names_views_that_differ(commands: Commands, pipeline: str) -> None:
    table = {"table": "public.customers", "source_rows": 4, "target_rows": 4, "equal": True, "differences": []}
    view = {"view": "dwd.wide", "rows": 3, "equal": False, "queued": 0, "differences": []}
    commands(verify=lambda p: {"equal": False, "tables": [table], "views": [view]})

    with pytest.raises(AirflowFailException, match=r"View dwd\.wide is not what its SELECT returns") as caught:
        CdcVerifyOperator(task_id="t", pipeline=pipeline).execute({})

    assert "Drop the table, and run the pipeline" in str(caught.value)
    assert "resnapshot" not in str(caught.value)


def test_verify_returns_equal_tables(commands: Commands, pipeline: str) -> None:
    result = {"equal": True, "tables": []}
    commands(verify=lambda p: result)

    assert CdcVerifyOperator(task_id="t", pipeline=pipeline).execute({}) == result


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        ({}, "nothing to report yet"),
        (
            {"chunks": 12, "finished": 7, "rows": 70_000, "seconds": 2.0, "rows_per_second": 35_000},
            "7 of 12 chunks finished, 70,000 rows, 35,000 rows/s",
        ),
        (
            {"applied_lsn": "0/16B3748", "changes": 1200, "rows_per_second": 0, "lag_bytes": 3 << 20, "lag_seconds": 2},
            "1,200 changes applied up to 0/16B3748, lag 3.0 MiB / 2.0 s",
        ),
        ({"lag_bytes": None, "lag_messages": 1500}, "lag 1,500 messages"),
        (
            {"restart": {"attempt": 2, "of": 20, "error": {"message": "the sink is gone"}}},
            "attempt 2 of 20 follows: the sink is gone",
        ),
    ],
)
def test_progress_is_one_readable_line(progress: dict[str, Any], line: str) -> None:
    assert progress_line(progress) == line


def test_sizes_are_readable() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "5.0 TiB"]


@pytest.mark.parametrize(
    ("connection", "message"),
    [
        ({}, "'spark', named by spark_conn_id, does not exist"),
        ({"conn_type": "spark", "host": "yarn", "extra": {"spark-binary": "sh"}}, "has the spark-binary 'sh'"),
    ],
)
def test_a_wrong_spark_connection_is_an_error_before_anything_is_begun(
    pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connection: dict[str, Any], message: str
) -> None:
    if connection:
        monkeypatch.setenv("AIRFLOW_CONN_SPARK", connection_json(**connection))
    operator = CdcStreamOperator(task_id="t", pipeline=pipeline, spark_conn_id="spark")
    stored: dict[str, Any] = {}

    with pytest.raises(AirflowFailException, match=message):
        operator.execute({"task_state_store": stored, "ti": task_instance(0, 1)})  # type: ignore[typeddict-item]

    assert not stored
    assert not (tmp_path / "state" / "submissions").exists()


@pytest.mark.parametrize(
    ("until", "argument"),
    [
        ("caught up", "caught-up"),
        ("caught-up", "caught-up"),
        ("caught_up", "caught-up"),
        ("forever", "forever"),
        ("stopped", "forever"),
        ("0/1F", "lsn:0/1F"),
        ("lsn:0/1F", "lsn:0/1F"),
    ],
)
def test_an_end_of_the_stream_may_be_said_in_many_ways(until: str, argument: str) -> None:
    operator = CdcStreamOperator(task_id="t", pipeline="p", epoch=7, until=until)

    assert operator.command_arguments() == ["--until", argument]


def test_an_end_that_is_none_is_refused_before_anything_is_begun(pipeline: str, tmp_path: Path) -> None:
    operator = CdcStreamOperator(task_id="t", pipeline=pipeline, until="noon")

    with pytest.raises(AirflowFailException, match="'noon' is not valid"):
        operator.execute({"task_state_store": {}, "ti": task_instance(0, 1)})  # type: ignore[typeddict-item]

    assert not (tmp_path / "state" / "submissions").exists()


def test_spark_submit_is_that_of_the_installed_pyspark_when_path_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    binary, home = spark_job.find_spark_submit()

    assert home is not None
    assert Path(binary) == home / "bin" / "spark-submit"
    assert (home / "jars").is_dir()
    with pytest.raises(SparkUnusable, match="spark3-submit is not on PATH"):
        spark_job.find_spark_submit("spark3-submit")
    with pytest.raises(SparkUnusable, match="has the spark-binary '/bin/sh'"):
        spark_job.find_spark_submit("/bin/sh")


def test_the_engine_is_packed_without_what_needs_airflow(tmp_path: Path) -> None:
    names = zipfile.ZipFile(spark_job.pack_engine(tmp_path)).namelist()

    assert "airflow_cdc_provider/__init__.py" in names
    assert "airflow_cdc_provider/engine/pipeline/pipeline.py" in names
    assert all(name.startswith("airflow_cdc_provider/engine/") for name in names[1:])
