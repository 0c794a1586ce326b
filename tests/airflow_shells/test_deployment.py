"""Submissions for each master and deploy mode, and their effect in Kubernetes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow_support import connection_json, write_pipeline

# isort: split
from airflow.providers.apache.spark.hooks import spark_submit

from airflow_cdc_provider.engine.core.errors import SparkUnusable
from airflow_cdc_provider.engine.spark.python_interpreter import python_for_spark
from airflow_cdc_provider.engine.spark.settings import END_WITHOUT_MEMORY
from airflow_cdc_provider.engine.state.submission import Submission
from airflow_cdc_provider.hooks import spark_job
from airflow_cdc_provider.hooks.cdc import load_pipeline
from airflow_cdc_provider.hooks.deployment import LAUNCHER, Deployment
from airflow_cdc_provider.hooks.keeper import Assignment
from airflow_cdc_provider.hooks.spark_job import SparkJobHook
from tests.support.kubernetes_api import kubernetes

pytestmark = pytest.mark.airflow

JOB = Submission("7", "shop", "stream", ["stream", "--pipeline", "shop.yaml"], 0.0)
CLUSTER = {"deploy-mode": "cluster"}


class Submitted:
    """A submission that a hook passes to the keeper.

    :param host: host of the Spark connection.
    :param python: the Python that the user has named for Spark.
    """

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        host: str,
        extra: Any,
        python: str | None = "python3",
        address: str | None = "127.0.0.1",
        **conf: str,
    ) -> None:
        seen: list[Assignment] = []
        monkeypatch.setattr(spark_job, "start_keeper", lambda assignment, environment: seen.append(assignment))
        monkeypatch.setattr(spark_submit, "kube_client", object(), raising=False)
        monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", "postgresql://cdc:n0tTelling@db/shop")
        monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", "postgresql://cdc@dw/dw")
        monkeypatch.setenv("AIRFLOW_CONN_SPARK", connection_json(conn_type="spark", host=host, extra=extra))
        monkeypatch.setenv("HARMLESS", "a credential of the cloud")
        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            monkeypatch.delenv(name, raising=False)
        if python is not None:
            monkeypatch.setenv("PYSPARK_PYTHON", python)
        monkeypatch.setenv("SPARK_LOCAL_IP", address) if address else monkeypatch.delenv("SPARK_LOCAL_IP", False)
        loaded = load_pipeline(write_pipeline(tmp_path))
        SparkJobHook("spark", loaded=loaded, name="stream of shop", conf=conf).start(JOB)
        (self.assignment,) = seen
        self.command = self.assignment.command
        self.environment = self.assignment.environment

    def option(self, name: str) -> str:
        """Return the first value of an option."""
        return self.command[self.command.index(name) + 1]

    @property
    def conf(self) -> set[str]:
        given = zip(self.command, self.command[1:], strict=False)
        return {value for option, value in given if option == "--conf"}


@pytest.mark.parametrize(
    ("host", "extra", "conf"),
    [
        ("local[2]", {}, {f"spark.driver.defaultJavaOptions={END_WITHOUT_MEMORY} -XX:TieredStopAtLevel=1"}),
        ("spark://m:7077", {}, set()),
        ("yarn", {"deploy-mode": "client"}, set()),
        ("k8s://https://m:6443", {}, set()),
        (
            "spark://m:7077",
            CLUSTER,
            {
                "spark.standalone.submit.waitAppCompletion=true",
                "spark.driver.supervise=false",
                "spark.master.rest.enabled=false",
            },
        ),
        (
            "yarn",
            CLUSTER,
            {
                "spark.yarn.submit.waitAppCompletion=true",
                "spark.yarn.maxAppAttempts=1",
                "spark.yarn.appMasterEnv.AIRFLOW_CDC_SUBMISSION=7",
                "spark.yarn.appMasterEnv.AIRFLOW_CDC_STATE=STATE",
            },
        ),
        (
            "k8s://https://m:6443",
            CLUSTER | {"namespace": "cdc"},
            {
                "spark.kubernetes.submission.waitAppCompletion=true",
                "spark.kubernetes.namespace=cdc",
                "spark.kubernetes.driverEnv.AIRFLOW_CDC_SUBMISSION=7",
                "spark.kubernetes.driverEnv.AIRFLOW_CDC_STATE=STATE",
            },
        ),
    ],
)
def test_what_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, extra: dict[str, str], conf: set[str]
) -> None:
    submitted = Submitted(tmp_path, monkeypatch, host, extra)
    cluster, state = extra.get("deploy-mode") == "cluster", f"file://{tmp_path}/state"

    assert (submitted.option("--master"), submitted.option("--deploy-mode")) == (
        host,
        extra.get("deploy-mode", "client"),
    )
    assert submitted.assignment.cluster == cluster
    users = {"spark.log.level=WARN", "spark.ui.enabled=false", "spark.app.kept=from-file", "spark.app.merged=from-file"}
    assert submitted.conf - users == {value.replace("=STATE", f"={state}") for value in conf}
    assert ("AIRFLOW_CONN_SHOP_PG" in submitted.environment) == (not cluster)
    assert "n0tTelling" not in json.dumps(submitted.command)
    assert submitted.environment["PYSPARK_PYTHON"] == "python3"
    assert submitted.command[-3:] == JOB.command
    if not (cluster and host.startswith("spark")):
        assert submitted.command[-4] == str(spark_job.ENGINE_JOB)
        assert Path(submitted.option("--py-files")).parent == Path(submitted.assignment.directory)
        assert "HARMLESS" in submitted.environment


@pytest.mark.parametrize(("host", "executors"), [("local[2]", True), ("yarn", False), ("spark://m:7077", False)])
def test_processes_on_the_machine_of_the_driver_have_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, executors: bool
) -> None:
    found = Submitted(tmp_path, monkeypatch, host, {}, python=None, address=None).environment
    assert found.get("SPARK_LOCAL_IP") == ("127.0.0.1" if executors else None)
    if executors:
        assert found["PYSPARK_DRIVER_PYTHON"] == found["PYSPARK_PYTHON"]
        assert found.items() >= python_for_spark().items()
    else:
        assert found["PYSPARK_DRIVER_PYTHON"] == sys.executable
        assert "PYSPARK_PYTHON" not in found


def test_a_standalone_cluster_runs_a_launcher_that_finds_all_in_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = Submitted(tmp_path, monkeypatch, "spark://m:7077", CLUSTER)
    jar, *launched = submitted.command[submitted.command.index(LAUNCHER) + 3 :]
    script = jar.replace(".jar", ".py")

    assert launched[:6] == ["--master", "spark://m:7077", "--deploy-mode", "client", "--name", "stream of shop"]
    assert launched[6:] == ["--py-files", "{{USER_JAR}}", script, *JOB.command]
    for url in (jar, script):
        path = Path(url.removeprefix("file://"))
        assert path.parent == tmp_path / "state" / "engine"
        assert path.stat().st_size
    shown = set(submitted.environment) - {"PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "JAVA_HOME"}
    assert {"PYSPARK_PYTHON"} <= shown <= {name for name in shown if name.startswith(("SPARK_", "PYSPARK_", "HADOOP_"))}
    assert "SPARK_LOCAL_IP" not in shown


@pytest.mark.parametrize("extra", [{}, CLUSTER])
def test_secret_configuration_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, str]
) -> None:
    submitted = Submitted(tmp_path, monkeypatch, "yarn", extra, **{"spark.hadoop.fs.s3a.secret.key": " n0t\\Télling"})

    assert "n0t" not in json.dumps(submitted.command)
    assert submitted.command[1] == "--load-spark-defaults"
    file = Path(submitted.option("--properties-file"))
    assert file.read_text() == "spark.hadoop.fs.s3a.secret.key=\\ n0t\\\\T\\u00e9lling"
    assert file.stat().st_mode & 0o777 == 0o600
    assert " n0t\\Télling" in submitted.assignment.secrets


@pytest.mark.spark
def test_kubernetes_is_given_a_driver_that_knows_its_job_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "upload").mkdir()
    conf = {"container.image": "spark", "file.upload.path": f"file://{tmp_path}/upload"}
    with kubernetes() as (address, given):
        submitted = Submitted(
            tmp_path,
            monkeypatch,
            f"k8s://{address}",
            CLUSTER,
            **{f"spark.kubernetes.{name}": value for name, value in conf.items()},
            **{"spark.hadoop.fs.s3a.secret.key": "n0tShown"},
        )
        done = subprocess.run(
            submitted.command, env=submitted.environment, capture_output=True, text=True, timeout=120, check=False
        )

    assert done.returncode == 0, done.stderr[-4000:]
    (pod,) = (each for each in given.values() if each["kind"] == "Pod")
    (driver,) = pod["spec"]["containers"]
    assert {"name": "AIRFLOW_CDC_SUBMISSION", "value": "7"} in driver["env"]
    assert driver["args"][-4].endswith("/job.py")
    assert driver["args"][-3:] == JOB.command
    (uploaded,) = (tmp_path / "upload").glob("*/airflow_cdc_engine.zip")
    assert uploaded.stat().st_size
    shown = json.dumps(given)
    assert "n0tTelling" not in shown
    assert "HARMLESS" not in shown
    assert "spark.hadoop.fs.s3a.secret.key=n0tShown" in shown  # in a ConfigMap, as with every submission to Kubernetes


@pytest.mark.parametrize(
    ("host", "mode", "conf", "message"),
    [
        ("local[2]", "cluster", {}, r"has deploy-mode cluster on local\[2\]"),
        ("yarn", "batch", {}, "has deploy-mode 'batch'"),
        ("spark://m:7077", "cluster", {"spark.authenticate.secret": "x"}, "including spark.authenticate.secret"),
    ],
)
def test_what_cannot_be_had_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, mode: str, conf: dict[str, str], message: str
) -> None:
    with pytest.raises(SparkUnusable, match=message):
        Submitted(tmp_path, monkeypatch, host, {"deploy-mode": mode}, **conf)


def test_kubernetes_needs_its_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK", connection_json(conn_type="spark", host="k8s://https://m:6443"))
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", "postgresql://cdc@db/shop")
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", "postgresql://cdc@dw/dw")
    monkeypatch.delattr(spark_submit, "kube_client", raising=False)

    with pytest.raises(SparkUnusable, match="only if the provider for Kubernetes is installed"):
        SparkJobHook("spark", loaded=load_pipeline(write_pipeline(tmp_path)), name="stream", conf={})


def test_the_manager_of_a_master() -> None:
    masters = ["local", "local[*]", "spark://a:1,b:1", "yarn", "k8s://https://m:6443"]

    assert [Deployment(master, "client").manager for master in masters] == ["local", "local", "spark", "yarn", "k8s"]
