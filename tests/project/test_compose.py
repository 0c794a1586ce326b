"""The compose file describes a stack that can start; this is checked without an engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yaml"
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
AIRFLOW_PROCESSES = ("airflow-api-server", "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer")
SERVICES = {*AIRFLOW_PROCESSES, "airflow-init", "spark-master", "spark-worker", "source-db", "target-db", "metadata-db"}
VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(:-(?P<default>[^}]*))?\}")

Service = dict[str, Any]


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
    return content


@pytest.fixture(scope="module")
def services(stack: dict[str, Any]) -> dict[str, Service]:
    found: dict[str, Service] = stack["services"]
    return found


def with_defaults(text: str) -> str:
    """Return the text as compose would read it without a ``.env`` file."""
    return VARIABLE.sub(lambda match: match["default"], text)


def test_all_parts_of_the_stack_are_there(services: dict[str, Service]) -> None:
    assert set(services) == SERVICES


def test_every_service_runs_an_image_and_has_a_health_check(services: dict[str, Service]) -> None:
    for name, service in services.items():
        assert service["image"]
        assert "healthcheck" in service or name == "airflow-init"


def test_dependencies_exist_and_can_be_met(services: dict[str, Service]) -> None:
    for service in services.values():
        for name, dependency in service.get("depends_on", {}).items():
            assert dependency["condition"] in CONDITIONS
            assert dependency["condition"] != "service_healthy" or "healthcheck" in services[name]


def test_dependencies_have_no_circle(services: dict[str, Service]) -> None:
    def depth(name: str, path: tuple[str, ...] = ()) -> int:
        assert name not in path
        return 1 + max((depth(each, (*path, name)) for each in services[name].get("depends_on", {})), default=0)

    assert max(map(depth, services)) > 1


def test_volumes_are_declared_and_used(stack: dict[str, Any], services: dict[str, Service]) -> None:
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])]
    named = {source for source in mounted if not source.startswith(".")}

    assert named == set(stack["volumes"])
    assert all((ROOT / source).exists() for source in mounted if source.startswith("."))


def test_the_source_decodes_logically(services: dict[str, Service]) -> None:
    assert "wal_level=logical" in services["source-db"]["command"]


def test_airflow_and_the_executors_share_the_state(services: dict[str, Service]) -> None:
    for name in (*AIRFLOW_PROCESSES, "spark-worker"):
        assert "state:/var/lib/airflow-cdc" in services[name]["volumes"]


def test_driver_and_executors_have_the_same_python(services: dict[str, Service]) -> None:
    images = {services[name]["image"] for name in (*AIRFLOW_PROCESSES, "spark-master", "spark-worker")}

    assert len(images) == 1


def test_connections_can_be_read_by_airflow(services: dict[str, Service]) -> None:
    environment = services["airflow-scheduler"]["environment"]
    connections = {
        name.removeprefix("AIRFLOW_CONN_"): json.loads(with_defaults(value))
        for name, value in environment.items()
        if name.startswith("AIRFLOW_CONN_")
    }

    assert connections["SPARK_DEFAULT"]["host"] == "spark://spark-master"
    for name, database in (("SHOP_PG", "source-db"), ("DW_PG", "target-db")):
        assert connections[name]["host"] == database
        assert connections[name]["schema"] == services[database]["environment"]["POSTGRES_DB"]
        assert connections[name]["password"] == with_defaults(services[database]["environment"]["POSTGRES_PASSWORD"])


def test_the_dag_finds_its_default_pipeline(services: dict[str, Service]) -> None:
    """The example's file is where the Dag looks for it, and Airflow and Spark can both reach its state."""
    scheduler = services["airflow-scheduler"]
    assert "./docs/examples:/opt/airflow/pipelines:ro" in scheduler["volumes"]
    assert "/opt/airflow/pipelines/shop.yaml" in (ROOT / "airflow_cdc_provider" / "dag.py").read_text()
    environment = dict.fromkeys(("AIRFLOW_CONN_SHOP_PG", "AIRFLOW_CONN_DW_PG"), "postgresql://u@h/d")
    state = {"CDC_STATE": scheduler["environment"]["CDC_STATE"]}
    pipeline = Pipeline.load(ROOT / "docs" / "examples" / "shop.yaml", environment | state)
    mounts = [volume.split(":")[1] for volume in scheduler["volumes"]]
    assert any(pipeline.state.startswith(f"file://{mount}/") for mount in mounts)


def test_every_variable_has_a_default() -> None:
    text = "\n".join(line for line in COMPOSE_FILE.read_text().splitlines() if not line.startswith("#"))

    assert {match["name"] for match in VARIABLE.finditer(text) if match["default"] is None} == set()


def test_ports_are_published_on_loopback_only(services: dict[str, Service]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]

    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_image_has_the_airflow_of_the_lock() -> None:
    base = re.search(r"^FROM apache/airflow:([\d.]+)-", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    locked = re.search(r"^apache-airflow==([\d.]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)

    assert base is not None
    assert locked is not None
    assert base[1] == locked[1]


def compose_client() -> list[str] | None:
    """Return the command of a compose client, which needs no engine to check a file."""
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def test_the_compose_client_accepts_the_file() -> None:
    client = compose_client()
    if client is None:
        pytest.skip("no docker compose client")

    done = subprocess.run(
        [*client, "--file", str(COMPOSE_FILE), "config", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
