"""The kinds of sources and sinks by name: built-in ones, and those of other packages.

A package registers a kind with an entry point. Its name is the ``type`` in a pipeline file, and its object is the
plugin: a :class:`.SourcePlugin` in the group ``airflow_cdc_provider.sources``, or a :class:`.SinkPlugin` in
``airflow_cdc_provider.sinks``. The built-in kinds are not entry points, because Spark receives only the engine's code,
without an installed package.
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

PipelineEnd = Literal["source", "sink"]

_OURS: Mapping[PipelineEnd, Mapping[str, str]] = {
    "source": {"postgres": "PostgresSourcePlugin", "kafka": "KafkaSourcePlugin"},
    "sink": {
        "postgres": "PostgresPlugin",
        "mysql": "MysqlPlugin",
        "delta": "DeltaPlugin",
        "files": "FilesPlugin",
        "kafka": "KafkaPlugin",
    },
}


def types(side: PipelineEnd) -> tuple[str, ...]:
    """Return the names of all kinds, built-in ones first."""
    return (*_OURS[side], *sorted(_others(side).keys() - _OURS[side].keys()))


def as_type(side: PipelineEnd) -> Callable[[object], str]:
    """Return the check for the ``type`` of a section; it searches packages only for a name that is not built in."""

    def check(value: object) -> str:
        return value if isinstance(value, str) and value in _OURS[side] else one_of(*types(side))(value)

    return check


def is_type(side: PipelineEnd, name: str) -> bool:
    """Return whether a kind of that name exists."""
    return name in _OURS[side] or name in _others(side)


def source_kind(name: str) -> SourceKind:
    """Return the plugin of a kind of source.

    :raises ConfigError: if no kind has that name, or if its package cannot be imported.
    """
    return cast(SourceKind, _plugin("source", name))


def sink_plugin(name: str) -> SinkPlugin[SinkSettings]:
    """Return the plugin of a kind of sink.

    :raises ConfigError: as :func:`source_kind`.
    """
    return cast("SinkPlugin[SinkSettings]", _plugin("sink", name))


@cache
def _plugin(side: PipelineEnd, name: str) -> Any:
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
            f"Reinstall the package of this {side} with all its dependencies.",
        ) from e
    if not hasattr(plugin, "settings"):
        raise ConfigError(
            f"{side}.type: {name!r} is registered as {found.value}, which is not a plugin: it has no `settings`",
            f"Install a version of this {side}'s package that registers a plugin. Older versions registered the class"
            " of the settings, which is an attribute of the plugin.",
        )
    return plugin()


def _others(side: PipelineEnd) -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=f"airflow_cdc_provider.{side}s")}
