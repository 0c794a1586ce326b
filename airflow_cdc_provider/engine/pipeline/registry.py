"""Kinds of sources and of sinks by their names: ours, and those of other packages.

A package registers a kind by an entry point, whose name is the ``type`` in a pipeline file and whose object is the
plugin: of the group ``airflow_cdc_provider.sources`` a :class:`.SourcePlugin`, of ``airflow_cdc_provider.sinks`` a
:class:`.SinkPlugin`. Ours are not entry points: where Spark is sent only the engine, nothing is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, cast

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section_values import one_of
from airflow_cdc_provider.engine.pipeline.kinds import SinkPlugin, SinkSettings, SourceKind

Side = Literal["source", "sink"]

_OURS: Mapping[Side, Mapping[str, str]] = {
    "source": {"postgres": "PostgresSourcePlugin", "kafka": "KafkaSourcePlugin"},
    "sink": {
        "postgres": "PostgresPlugin",
        "mysql": "MysqlPlugin",
        "delta": "DeltaPlugin",
        "files": "FilesPlugin",
        "kafka": "KafkaPlugin",
    },
}


def types(side: Side) -> tuple[str, ...]:
    """Names of all kinds, ours first."""
    return (*_OURS[side], *sorted(_others(side).keys() - _OURS[side].keys()))


def as_type(side: Side) -> Callable[[object], str]:
    """Return what checks the ``type`` of a section; packages are searched only for a name that is none of ours."""

    def check(value: object) -> str:
        return value if isinstance(value, str) and value in _OURS[side] else one_of(*types(side))(value)

    return check


def is_type(side: Side, name: str) -> bool:
    """Whether there is a kind of that name."""
    return name in _OURS[side] or name in _others(side)


def source_kind(name: str) -> SourceKind:
    """The plugin of a kind of sources.

    :raises ConfigError: when there is none of that name, or its package cannot be imported.
    """
    return cast(SourceKind, _plugin("source", name))


def sink_plugin(name: str) -> SinkPlugin[SinkSettings]:
    """The plugin of a kind of sinks.

    :raises ConfigError: as :func:`source_kind`.
    """
    return cast("SinkPlugin[SinkSettings]", _plugin("sink", name))


@cache
def _plugin(side: Side, name: str) -> Any:
    if name in _OURS[side]:
        module = importlib.import_module(f"airflow_cdc_provider.engine.{side}s.{name}.plugin")
        return getattr(module, _OURS[side][name])()
    found = _others(side).get(name)
    if found is None:
        raise ConfigError(f"{side}.type: a text is not valid", f"Give one of {', '.join(types(side))}.")
    try:
        plugin = found.load()
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"{side}.type: {name!r} is registered as {found.value}, which cannot be loaded: {e}",
            f"Install the package that brings this {side} anew, with all it needs.",
        ) from e
    if not hasattr(plugin, "settings"):
        raise ConfigError(
            f"{side}.type: {name!r} is registered as {found.value}, which is no plugin: it has no `settings`",
            f"Install a version of the package that brings this {side} which registers a plugin: the class of the"
            " settings, which was registered before, is an attribute of it.",
        )
    return plugin()


def _others(side: Side) -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=f"airflow_cdc_provider.{side}s")}
