"""The kinds of sinks that there are, by the ``type`` in the pipeline file: ours, and those that packages bring.

A package registers its class of :class:`.SinkSettings` as an entry point of the group ``airflow_cdc_provider.sinks``.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.pipeline.kinds import SinkSettings

GROUP = "airflow_cdc_provider.sinks"

# Not as entry points of our own: where Spark is sent only the engine, nothing is installed.
_OURS = {
    "postgres": "PostgresSettings",
    "mysql": "MysqlSettings",
    "delta": "DeltaSettings",
    "files": "FilesSettings",
    "kafka": "KafkaSettings",
}


def sink_types() -> tuple[str, ...]:
    """Names of all kinds of sinks, ours first."""
    return (*_OURS, *sorted(_others().keys() - _OURS.keys()))


def sink_settings(name: str) -> type[SinkSettings]:
    """The class of a kind of sinks.

    :raises ConfigError: when there is none of that name, or its package cannot be imported.
    """
    if name in _OURS:
        module = importlib.import_module(f"airflow_cdc_provider.engine.sinks.{name}.settings")
        return cast("type[SinkSettings]", getattr(module, _OURS[name]))
    found = _others().get(name)
    if found is None:
        raise ConfigError("sink.type: a text is not valid", f"Give one of {', '.join(sink_types())}.")
    try:
        return cast("type[SinkSettings]", found.load())
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"sink.type: {name!r} is registered as {found.value}, which cannot be loaded: {e}",
            "Install the package that brings this sink anew, with all it needs.",
        ) from e


def _others() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=GROUP)}
