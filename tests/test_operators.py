"""The operators: what they make of the engine's answers and of Spark jobs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.airflow_support import STATUS, connection_json, install_commands, write_pipeline

# isort: split
import psutil
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_cdc_provider.demo.servers import await_condition
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import ExitCode, GateClosed, SecondWriter, ServerNotReady, SparkUnusable
from airflow_cdc_provider.hooks import spark_job
from airflow_cdc_provider.hooks.process_group import ProcessGroup
from airflow_cdc_provider.operators import progress
from airflow_cdc_provider.operators.cdc import (
    CdcPlanOperator,
    CdcPreflightOperator,
    CdcProvisionOperator,
    CdcSnapshotOperator,
    CdcStreamOperator,
    CdcVerifyOperator,
    plan_groups,
)
from airflow_cdc_provider.operators.progress import ProgressLog, format_bytes, progress_line
from airflow_cdc_provider.operators.spark import job_failure

pytestmark = pytest.mark.airflow

Commands = Callable[..., Any]

REPORTER = """
import json, os, sys
from pathlib import Path
from pyspark.sql import SparkSession
import airflow_cdc_provider.engine.config as config

spark = SparkSession.builder.getOrCreate()
pipeline = config.Pipeline.load(sys.argv[sys.argv.index("--pipeline") + 1])
conf = dict(spark.sparkContext.getConf().getAll())
Path(__file__).with_suffix(".json").write_text(json.dumps({
    "arguments": sys.argv[1:], "engine": config.__file__, "dsn": pipeline.sink.dsn, "conf": conf,
    "environment": dict(os.environ), "name": spark.sparkContext.appName, "master": spark.sparkContext.master,
    "command_line": Path(f"/proc/{os.getppid()}/cmdline").read_text().split(chr(0)),
}))
spark.stop()
print(json.dumps({"rows": 3}))
sys.exit(int(Path(__file__).with_suffix(".exit").read_text()))
"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Puts functions in the place of the engine's commands during the test."""
    import airflow_cdc_provider.engine as engine

    name = "airflow_cdc_provider.engine.commands"
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name, SimpleNamespace()))
    monkeypatch.setattr(engine, "commands", None, raising=False)
    return install_commands


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The path of a pipeline file whose connections Airflow knows."""
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", "postgresql://cdc@db/shop")
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", "postgresql://cdc:hidden@dw/dw")
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection_json(conn_type="spark", host="local[1]"))
    return str(write_pipeline(tmp_path))


def fail_with(error: Exception) -> Callable[..., Any]:
    """A command that fails."""

    def command(*args: object, **kwargs: object) -> None:
        raise error

    return command


def test_preflight_returns_the_findings(commands: Commands, pipeline: str) -> None:
    findings = [
        {"check": "wal_level", "ok": True, "message": "wal_level is logical."},
        {"check": "keep", "ok": False, "message": "No limit is set.", "solution": "Set max_slot_wal_keep_size."},
    ]
    commands(preflight=lambda p: {"findings": findings})

    assert CdcPreflightOperator(task_id="t", pipeline=pipeline).execute({}) == {"findings": findings}


def test_provision_returns_what_the_engine_returned(commands: Commands, pipeline: str) -> None:
    result = {"epoch": 7, "applied_lsn": "0/1", "tables": ["public.orders"], "chunks": 3, "restart_lsn": "0/0"}
    seen: list[object] = []

    def provision(pipeline: Pipeline, takeover: bool) -> dict[str, object]:
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

    assert type(caught.value) is kind
    assert str(caught.value) == f"{error}.\n{error.solution}"  # type: ignore[attr-defined]


def test_a_wrong_pipeline_file_is_not_retried(commands: Commands, tmp_path: Path) -> None:
    commands(preflight=fail_with(AssertionError("was called")))

    with pytest.raises(AirflowFailException, match="cannot be read"):
        CdcPreflightOperator(task_id="t", pipeline=str(tmp_path / "none.yaml")).execute({})


@pytest.mark.parametrize(
    ("unfinished", "groups", "planned"),
    [(5, 2, ["0/2", "1/2"]), (1, 4, ["0/1"]), (0, 4, []), (3, 3, ["0/3", "1/3", "2/3"])],
)
def test_there_are_no_more_groups_than_chunks(unfinished: int, groups: int, planned: list[str]) -> None:
    assert plan_groups(unfinished, groups) == planned


def test_plan_takes_a_rendered_number(commands: Commands, pipeline: str) -> None:
    commands(unfinished=lambda p: [{"table": "public.orders", "index": i, "title": str(i)} for i in range(3)])

    assert CdcPlanOperator(task_id="t", pipeline=pipeline, groups="2").execute({}) == ["0/2", "1/2"]
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
    assert str(caught.value).endswith("No stream is running, and 2.0 KiB of WAL are not applied yet.")
    assert "customers" not in str(caught.value)


def test_verify_returns_equal_tables(commands: Commands, pipeline: str) -> None:
    result = {"equal": True, "tables": []}
    commands(verify=lambda p: result)

    assert CdcVerifyOperator(task_id="t", pipeline=pipeline).execute({}) == result


def test_progress_is_one_readable_line() -> None:
    assert progress_line(STATUS) == (
        "shop: 7 of 12 chunks finished, lag 3.1 MiB / 2.4 s, applied up to 0/16B3748, "
        "slot retains 64.0 MiB of WAL (reserved)"
    )
    empty = dict.fromkeys(STATUS, None) | {"pipeline": "shop", "state": "new"}
    assert progress_line(empty) == "shop: new"
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 << 40)] == ["0 bytes", "1023 bytes", "1.0 KiB", "5.0 TiB"]


def test_progress_is_logged_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.01)
    lines: list[str] = []
    answers = iter([ValueError("no state yet"), STATUS, STATUS, {**STATUS, "lag_bytes": 0}])
    logged = threading.Event()

    def status() -> Any:
        answer = next(answers, None)
        if answer is None:
            logged.set()
        if isinstance(answer, Exception):
            raise answer
        return answer or {**STATUS, "lag_bytes": 0}

    with ProgressLog(status, lines.append):
        assert logged.wait(10)

    assert lines[0] == "The progress cannot be read at the moment: no state yet"
    assert ["3.1 MiB" in line for line in lines[1:]] == [True, False]


BLOCKED = {"kind": "Blocked", "message": "waited too long", "solution": "End it.", "retry": "retry"}
GATE = {"kind": "GateClosed", "message": "slot is gone", "solution": "Resnapshot.", "retry": "ask"}


@pytest.mark.parametrize(
    ("exit_code", "reported", "recorded", "kind", "text"),
    [
        (ExitCode.FAILED, BLOCKED, None, AirflowException, "waited too long.\nEnd it."),
        (ExitCode.REFUSED, GATE, BLOCKED, AirflowFailException, "slot is gone.\nResnapshot."),
        (ExitCode.REFUSED, {**GATE, "kind": "SecondWriter"}, None, AirflowException, "slot is gone.\nResnapshot."),
        (ExitCode.FAILED, {**GATE, "kind": "New"}, None, AirflowFailException, "slot is gone.\nResnapshot."),
        (ExitCode.FAILED, None, BLOCKED, AirflowException, "waited too long.\nEnd it."),
        (ExitCode.FAILED, None, None, AirflowException, "the Spark job failed with exit code 1.\noutput"),
        (ExitCode.INVALID, None, None, AirflowFailException, "the Spark job failed with exit code 2.\noutput"),
        (137, None, None, AirflowException, "the Spark job failed with exit code 137.\noutput"),
    ],
)
def test_a_failed_job_fails_as_its_last_error_asks(
    exit_code: int, reported: dict[str, str], recorded: dict[str, str], kind: type[Exception], text: str
) -> None:
    error = job_failure(exit_code, reported, recorded, "output")

    assert type(error) is kind
    assert str(error) == text


def test_an_unknown_spark_connection_is_an_error_not_yarn(commands: Commands, pipeline: str) -> None:
    commands()
    operator = CdcStreamOperator(task_id="t", pipeline=pipeline, epoch=7, spark_conn_id="nowhere")

    with pytest.raises(AirflowFailException, match="'nowhere', named by spark_conn_id, does not exist"):
        operator.execute({})


@pytest.mark.parametrize(("until", "argument"), [("caught-up", "caught-up"), ("0/1F", "lsn:0/1F")])
def test_a_bare_lsn_is_an_end_of_the_stream(until: str, argument: str) -> None:
    operator = CdcStreamOperator(task_id="t", pipeline="p", epoch=7, until=until)

    assert operator.command_arguments() == ["--until", argument]


def test_spark_submit_is_that_of_the_installed_pyspark_when_path_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    binary, home = spark_job.find_spark_submit()

    assert home is not None
    assert Path(binary) == home / "bin" / "spark-submit"
    assert (home / "jars").is_dir()
    with pytest.raises(SparkUnusable, match="spark3-submit is not on PATH"):
        spark_job.find_spark_submit("spark3-submit")
    with pytest.raises(SparkUnusable, match="names '/bin/sh' as its spark-binary"):
        spark_job.find_spark_submit("/bin/sh")


def test_the_engine_is_packed_without_what_needs_airflow() -> None:
    with spark_job.packed_engine() as archive:
        names = zipfile.ZipFile(archive).namelist()

    assert "airflow_cdc_provider/__init__.py" in names
    assert "airflow_cdc_provider/engine/config.py" in names
    assert all(name.startswith("airflow_cdc_provider/engine/") for name in names[1:])
    assert not archive.parent.exists()


@pytest.mark.spark
def test_a_job_runs_with_engine_secrets_and_configuration(
    commands: Commands, pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "core-secret")
    application = tmp_path / "reporter.py"
    application.write_text(REPORTER)
    application.with_suffix(".exit").write_text("0")
    commands()
    operator = CdcSnapshotOperator(
        task_id="t",
        pipeline=pipeline,
        epoch="7",
        group="0/2",
        conf={"spark.app.merged": "from-operator"},
        application=str(application),
    )

    result = operator.execute({})

    assert result == {"rows": 3}
    report = json.loads(application.with_suffix(".json").read_text())
    assert report["arguments"] == ["snapshot", "--pipeline", pipeline, "--epoch", "7", "--json", "--group", "0/2"]
    assert "airflow_cdc_engine.zip" in report["engine"]
    assert (report["name"], report["master"]) == ("airflow-cdc shop snapshot", "local[1]")
    assert report["conf"]["spark.app.kept"] == "from-file"
    assert report["conf"]["spark.app.merged"] == "from-operator"
    assert report["dsn"] == "postgresql://cdc:hidden@dw/dw"
    assert not any("hidden" in argument for argument in report["command_line"])
    assert "core-secret" not in report["environment"].values()

    application.with_suffix(".exit").write_text("3")
    application.with_suffix(".json").unlink()
    commands(status=lambda p: {**STATUS, "last_error": GATE if application.with_suffix(".json").exists() else None})
    with pytest.raises(AirflowFailException, match=r"slot is gone\.\nResnapshot\."):
        operator.execute({})


def test_a_group_ends_with_members_that_ignore_sigterm_or_left_it(tmp_path: Path) -> None:
    script = f"trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ > {tmp_path}/pid; sleep 60' & sleep 60"

    with ProcessGroup() as group:
        psutil.Popen(["/bin/sh", "-c", script], process_group=group.id)
        assert await_condition(lambda: (tmp_path / "pid").exists() and len(group.members()) >= 4, 60)
        members = group.members()
        group.end(grace=0.2)
        assert group.members() == set()

    assert int((tmp_path / "pid").read_text()) in {member.pid for member in members}
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members)


SUPERVISED = """
import subprocess, time
from airflow_cdc_provider.hooks.process_group import ProcessGroup, ending_with_supervisor

with ending_with_supervisor(), ProcessGroup() as group:
    member = subprocess.Popen(["sleep", "600"], process_group=group.id, stdin=subprocess.DEVNULL)
    print(member.pid, flush=True)
    time.sleep(600)
"""


def test_a_task_and_its_group_end_with_the_supervisor() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        task = subprocess.Popen([sys.executable, "-c", SUPERVISED], stdin=theirs, stdout=subprocess.PIPE, text=True)
    assert task.stdout is not None
    try:
        with ours, task.stdout:
            member = psutil.Process(int(task.stdout.readline()))
            ours.send(b"an answer")
            assert task.poll() is None
        assert task.wait(60) == 1
    finally:
        task.kill()
    _, alive = psutil.wait_procs([member], timeout=60)
    assert not alive
