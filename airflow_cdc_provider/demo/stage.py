"""The demo's stage: a Postgres server with a shop, a warehouse, an Airflow with the Dags, and a pipeline file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from airflow_cdc_provider.demo import shop
from airflow_cdc_provider.demo.airflow import AirflowStack
from airflow_cdc_provider.demo.warehouse import POSTGRES, WAREHOUSES, Warehouse, start_server
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import CdcError

DAGS = Path(__file__).parents[2] / "dags"
DAG = "cdc_pipeline"

PIPELINE = """\
pipeline: shop
source:
  conn_id: shop_source
  tables: ["shop.*"]
sink:
{sink}state: {state}
snapshot: {{chunk_rows: 50000}}
stream: {{trigger: 1 second, heartbeat: 5 seconds}}
"""


class DemoFailed(CdcError):
    """The demo did not get where it should."""


@dataclass(frozen=True)
class Stage:
    """All that runs before anything happens.

    :param source: address of the shop.
    :param warehouse: the empty store that it is copied to.
    :param file: the pipeline file, which names connections of Airflow.
    """

    source: str
    warehouse: Warehouse
    airflow: AirflowStack
    file: Path

    @property
    def pipeline(self) -> Pipeline:
        """The file as the engine reads it."""
        return Pipeline.load(self.file, _variables(self.source, self.warehouse))


def set_stage(
    started: ExitStack, directory: Path, say: Callable[[str], None], sink: str = "postgres", scale: float = 1.0
) -> Stage:
    """Start servers and Airflow, and fill the shop.

    :param started: ends all of it.
    :param sink: kind of the warehouse, one of :data:`.WAREHOUSES`.
    :param scale: how large the shop is, 1 for a million rows.
    """
    if not DAGS.is_dir():
        raise DemoFailed(f"There is no {DAGS}.", "Run the demo in a clone of the repository, with `make demo`.")
    source = start_server(started, directory / "source", "shop")
    warehouse = WAREHOUSES[sink](started, directory / "target")
    say(f"The source is Postgres {POSTGRES} on port {source.port}, the target {warehouse.place}.")
    file = write_pipeline(directory, warehouse)
    settings = {
        **_variables(source.dsn("shop"), warehouse),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        # What the forms propose, and where the page looks.
        "AIRFLOW_CDC_PIPELINE": str(file),
        "AIRFLOW__AIRFLOW_CDC__PIPELINES": str(file.parent),
        # Those that have a schedule would begin at once.
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "True",
        "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
        **scratch(started),
    }
    stack = AirflowStack(directory / "airflow", DAGS, settings)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_shop, source.dsn("shop"), say, scale)
        airflow = started.enter_context(stack)
        loading.result()
    say(f"Airflow runs at {airflow.base_url} (no login needed).")
    return Stage(source.dsn("shop"), warehouse, airflow, file)


def _variables(source: str, warehouse: Warehouse) -> dict[str, str]:
    connections = {"shop_source": source, **warehouse.connections}
    return {f"AIRFLOW_CONN_{name.upper()}": uri for name, uri in connections.items()}


@contextmanager
def work_directory(chosen: Path | None) -> Iterator[Path]:
    """The directory of everything: the user's, which stays, or a temporary one."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        if any(chosen.iterdir()):
            raise DemoFailed(f"{chosen} is not empty.", "Choose a directory that is new or empty.")
        yield chosen.resolve()
        return
    directory = Path(tempfile.mkdtemp(prefix="cdc-demo-"))
    # Root starts Postgres as another user, who has to get through.
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def scratch(started: ExitStack) -> dict[str, str]:
    """Variables that send temporary files where they are removed: a Spark job that is killed leaves its own behind.

    Not below a directory that the user chose, since the path of a socket may have some hundred characters only.
    """
    path = started.enter_context(tempfile.TemporaryDirectory(prefix="cdc-demo-", ignore_cleanup_errors=True))
    options = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Djava.io.tmpdir={path}".strip()
    return {"TMPDIR": path, "SPARK_LOCAL_DIRS": path, "SPARK_SUBMIT_OPTS": options}


def load_shop(dsn: str, say: Callable[[str], None], scale: float) -> None:
    """Create and fill the shop's tables."""
    with psycopg.connect(dsn) as connection:
        shop.create_schema(connection)
    say(f"The shop is loaded: {shop.load(dsn, scale):,} rows in {len(shop.TABLES)} tables.")


def write_pipeline(directory: Path, warehouse: Warehouse) -> Path:
    """Write the pipeline file; it names Airflow's connections, so that no password is in it."""
    path = directory / "pipelines" / "shop.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(PIPELINE.format(sink=warehouse.section, state=f"file://{directory}/state"), encoding="utf-8")
    return path
