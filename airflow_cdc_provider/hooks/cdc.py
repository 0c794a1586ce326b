"""What the Airflow shells share: pipelines with Airflow's connections, and failures in Airflow's terms.

A pipeline file may name Airflow connections. Only Airflow can resolve them, and
only the worker talks to Airflow, so the file is read here with each connection
as a variable ``AIRFLOW_CONN_<ID>``, and the same variables go to the Spark driver,
which reads the file again without Airflow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import CdcError, Retry
from airflow_cdc_provider.hooks.postgres_cdc import POSTGRES_TYPES, find_connection, postgres_uri
from airflow_cdc_provider.retry import CdcTaskFailed, CdcTaskRefused

_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline whose connections Airflow resolved.

    :param path: the file, absolute.
    :param environment: variables with which another process reads the same pipeline from the file.
    """

    path: Path
    pipeline: Pipeline
    environment: Mapping[str, str] = field(repr=False)


def load_pipeline(path: str | os.PathLike[str]) -> LoadedPipeline:
    """Read a pipeline file with the connections of Airflow.

    :param path: a pipeline file.
    :raises ConfigError: when the file is wrong or names a connection that does not exist.
    """
    file = Path(path).absolute()
    environment: dict[str, str] = {}
    try:
        text = file.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        pass  # Pipeline.load says what is wrong with the file
    else:
        environment |= {name: os.environ[name] for name in _VARIABLE.findall(text) if name in os.environ}
        for key, conn_id in _connection_ids(document, environment):
            environment[f"AIRFLOW_CONN_{conn_id.upper()}"] = _resolve(key, conn_id)
    return LoadedPipeline(file, Pipeline.load(file, environment), environment)


def failure(message: str, solution: str, retry: str, kind: str = "CdcError") -> CdcTaskFailed | CdcTaskRefused:
    """The exception that makes Airflow retry a task or not, as an error of the engine asks.

    :param retry: a value of :class:`~airflow_cdc_provider.engine.errors.Retry`.
    :param kind: the name of the engine's error.
    """
    directive = Retry(retry)
    shell = CdcTaskFailed if directive is Retry.RETRY else CdcTaskRefused
    return shell(message, solution, directive, kind)


@contextmanager
def airflow_failures() -> Iterator[None]:
    """Turn errors of the engine into failures of the task, with the solution in the text."""
    try:
        yield
    except CdcError as e:
        raise failure(e.message, e.solution, e.retry.value, e.kind) from e


def _connection_ids(document: object, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each ``conn_id`` of source and sinks with its key, variables in it expanded."""
    if not isinstance(document, dict):
        return
    sinks = document.get("sink")
    several = {f"sink[{n}]": sink for n, sink in enumerate(sinks)} if isinstance(sinks, list) else {"sink": sinks}
    for name, section in {"source": document.get("source"), **several}.items():
        conn_id = section.get("conn_id") if isinstance(section, dict) else None
        if isinstance(conn_id, str) and conn_id:
            yield f"{name}.conn_id", _VARIABLE.sub(lambda match: environment.get(match[1], match[0]), conn_id)


def _resolve(key: str, conn_id: str) -> str:
    """The value of a connection's variable; what is not Postgres is left to the engine to judge."""
    connection = find_connection(conn_id, key)
    return postgres_uri(connection) if connection.conn_type in POSTGRES_TYPES else connection.get_uri()
