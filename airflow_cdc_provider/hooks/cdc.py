"""The common base of the Airflow side: pipelines with Airflow's connections, and failures in Airflow's terms.

A pipeline file may name Airflow connections. Only Airflow can resolve them, and only the worker has access to Airflow.
Therefore this module reads the file with each connection as a variable ``AIRFLOW_CONN_<ID>``. The same variables are
passed to the Spark driver, which reads the file again without Airflow.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from airflow_cdc_provider.engine.core.errors import CdcError, Fenced, Retry, SecondWriter, hide_values
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.hooks.connections import POSTGRES_TYPES, find_connection, postgres_uri, require_type
from airflow_cdc_provider.remedy import in_airflow
from airflow_cdc_provider.retry import CdcTaskFailed, CdcTaskRefused

_log = logging.getLogger(__name__)
# The types of connections that these sources and sinks require.
_TYPES = {"postgres": POSTGRES_TYPES, "mysql": ("mysql", "mariadb")}
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline whose connections Airflow has resolved.

    :param path: absolute path of the file.
    :param environment: variables that another process needs to read the same pipeline from the file.
    """

    path: Path
    pipeline: Pipeline
    environment: Mapping[str, str] = field(repr=False)


def load_pipeline(path: str | os.PathLike[str]) -> LoadedPipeline:
    """Read a pipeline file with the connections of Airflow.

    :param path: path of a pipeline file.
    :raises ConfigError: if the file is invalid, or names a connection that does not exist.
    """
    file = Path(path).absolute()
    environment: dict[str, str] = {}
    try:
        text = file.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except Exception:
        pass  # Pipeline.load reports the problem of the file
    else:
        environment |= {name: os.environ[name] for name in _VARIABLE.findall(text) if name in os.environ}
        for key, conn_id, kind in _connection_ids(document, environment):
            if "@" in conn_id:  # an address that may have a password, which Airflow's errors would show
                continue
            environment[f"AIRFLOW_CONN_{conn_id.upper()}"] = _resolve(key, conn_id, kind)
    pipeline = Pipeline.load(file, environment)
    if not pipeline.messages.values:
        hide_values()
    return LoadedPipeline(file, pipeline, environment)


def failure(message: str, solution: str, retry: str, kind: str = "CdcError") -> CdcTaskFailed | CdcTaskRefused:
    """Return the exception that makes Airflow retry a task or not, according to the engine's retry directive.

    :param retry: a value of :class:`~airflow_cdc_provider.engine.core.errors.Retry`.
    :param kind: the name of the engine's error.
    """
    directive = Retry(retry)
    shell = CdcTaskFailed if directive is Retry.RETRY else CdcTaskRefused
    return shell(message, in_airflow(solution), directive, kind)


@contextmanager
def airflow_failures(path: str = "", part: str = "", *, ends_run: bool = True) -> Iterator[None]:
    """Turn errors of the engine into failures of the task, with the solution in the text.

    :param path: the pipeline file; if given, errors are also written into the pipeline's state for the page CDC.
    :param part: the part or command that runs in the block.
    :param ends_run: whether an error ends the run, so that the pipeline needs attention.
    """
    try:
        yield
    except CdcError as e:
        if path:
            _leave(path, part, e, ends_run)
        # Use only the engine's own traceback, because Airflow shows all chained ones.
        raise failure(e.message, e.solution, e.retry.value, e.kind).with_traceback(e.__traceback__) from None


def _leave(path: str, part: str, error: CdcError, ends_run: bool) -> None:
    """Write an error into a pipeline's state, unless it is already there, or the state belongs to another run."""
    if isinstance(error, SecondWriter | Fenced) or error.noted:
        return
    try:
        from airflow_cdc_provider.engine.runs.run_errors import last_error, note_error, record_error
        from airflow_cdc_provider.engine.state.files import State
        from airflow_cdc_provider.engine.state.heartbeat import read_heartbeats
        from airflow_cdc_provider.engine.state.location import refuse_others

        outline = Pipeline.outline(path)  # without connections, which may be the cause of the error
        if not _VARIABLE.search(outline.state):
            state = State(outline.state)
            refuse_others(state, outline.name)
            last = last_error(state)
            if last is None or (last["kind"], last["message"]) != (error.kind, error.message):
                alone = not any(beat.alive for beat in read_heartbeats(state))
                (record_error if ends_run and alone else note_error)(state, part, error)
    except Exception as e:  # any error of a file system of fsspec; the task's own error is more useful
        _log.info("The error could not be written into the pipeline's state: %s", e)


def _connection_ids(document: object, environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield each ``conn_id`` of source and sinks with its key and the section's ``type``; variables are expanded."""
    if not isinstance(document, dict):
        return
    sinks = document.get("sink")
    several = {f"sink[{n}]": sink for n, sink in enumerate(sinks)} if isinstance(sinks, list) else {"sink": sinks}
    for name, section in {"source": document.get("source"), **several}.items():
        for key in ("conn_id", "replication_conn_id"):
            conn_id = section.get(key) if isinstance(section, dict) else None
            if isinstance(conn_id, str) and conn_id:
                expanded = _VARIABLE.sub(lambda match: environment.get(match[1], match[0]), conn_id)
                yield f"{name}.{key}", expanded, str(section.get("type", "postgres"))


def _resolve(key: str, conn_id: str, kind: str) -> str:
    """Return the value of a connection's variable.

    :param kind: the kind of the source or sink; only for some kinds the type of the connection is checked here.
    """
    connection = find_connection(conn_id, key)
    if kind in _TYPES:
        require_type(connection, _TYPES[kind], key)
    return postgres_uri(connection) if connection.conn_type in POSTGRES_TYPES else connection.get_uri()
