"""The stage of every demo: a directory for everything, a pipeline file, and an Airflow with the Dags to run it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from demo.screen import Screen
from local_servers.airflow import AirflowStack

DAGS = Path(__file__).parents[1] / "dags"
DAG = "cdc_pipeline"


class DemoFailed(CdcError):
    """The demo did not reach its goal."""


@dataclass(frozen=True)
class Stage:
    """Everything that runs before the Dag is triggered.

    :param file: the pipeline file, which names connections of Airflow, so that it contains no password.
    :param connections: these connections, as URIs by id.
    """

    airflow: AirflowStack
    file: Path
    connections: Mapping[str, str]

    @property
    def pipeline(self) -> Pipeline:
        """Return the pipeline of the file."""
        return Pipeline.load(self.file, _variables(self.connections))


def start_airflow(
    started: ExitStack, directory: Path, file: Path, connections: Mapping[str, str], screen: Screen
) -> AirflowStack:
    """Start an Airflow that knows a pipeline file and the connections that it names.

    :param started: stops it when it is closed.
    """
    if not DAGS.is_dir():
        raise DemoFailed(
            f"The folder {DAGS} does not exist.", "Run the demo in a clone of the repository, with `make demo`."
        )
    settings = {
        **_variables(connections),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        # The default in the forms, and the folder that the page reads.
        "AIRFLOW_CDC_PIPELINE": str(file),
        "AIRFLOW__AIRFLOW_CDC__PIPELINES": str(file.parent),
        # Dags with a schedule would start at once otherwise.
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "True",
        "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
        **_scratch(started),
    }
    airflow = started.enter_context(AirflowStack(directory / "airflow", DAGS, settings))
    screen.say(f"Airflow runs at {airflow.base_url} (no login needed).")
    return airflow


def _variables(connections: Mapping[str, str]) -> dict[str, str]:
    return {f"AIRFLOW_CONN_{name.upper()}": uri for name, uri in connections.items()}


def _scratch(started: ExitStack) -> dict[str, str]:
    """Return variables that put temporary files where they are removed; a killed Spark job leaves its own behind.

    The place is not below a directory that the user chose, because a socket's path is limited to about 100 characters.
    """
    path = started.enter_context(tempfile.TemporaryDirectory(prefix="cdc-demo-", ignore_cleanup_errors=True))
    options = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Djava.io.tmpdir={path}".strip()
    return {"TMPDIR": path, "SPARK_LOCAL_DIRS": path, "SPARK_SUBMIT_OPTS": options}


@contextmanager
def work_directory(chosen: Path | None) -> Iterator[Path]:
    """Yield the directory for everything: the user's, which is kept, or a temporary one."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        if any(chosen.iterdir()):
            raise DemoFailed(f"{chosen} is not empty.", "Choose a directory that is new or empty.")
        yield chosen.resolve()
        return
    directory = Path(tempfile.mkdtemp(prefix="cdc-demo-"))
    # Root starts Postgres as another user, which needs access.
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_pipeline(directory: Path, name: str, text: str, **parts: str) -> Path:
    """Write a pipeline file into the folder where Airflow looks for pipelines.

    :param text: template with fields for the URL of its ``{state}`` and for the parts.
    """
    path = directory / "pipelines" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.format(state=f"file://{directory}/state", **parts), encoding="utf-8")
    return path
