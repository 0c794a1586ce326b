"""The ``views`` of a sink in the pipeline file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section import Section
from airflow_cdc_provider.engine.core.section_values import as_positive_integer, as_positive_seconds, as_text, one_of

MAX_ROWS = 100_000


@dataclass(frozen=True)
class ViewSettings:
    """A view as the pipeline file describes it.

    :param schema, name: the table that holds the view's rows.
    :param sql: its SELECT, over source tables, in the dialect of the sink.
    :param refresh: seconds between refreshes of a view whose changes are queued; ``None`` to move it with the mirror.
    :param max_rows: affected anchors in a unit beyond which they are queued.
    :param indexes: whether missing indexes are created, or only shown by ``airflow-cdc explain``.
    """

    schema: str
    name: str
    sql: str
    refresh: float | None = None
    max_rows: int = MAX_ROWS
    indexes: Literal["create", "print"] = "create"

    @property
    def label(self) -> str:
        """Return ``schema.name`` without quotes, which identifies the view in messages and records."""
        return f"{self.schema}.{self.name}"


def take_views(section: Section) -> tuple[ViewSettings, ...]:
    """Take the ``views`` of a sink's section.

    :raises ConfigError: when one is malformed, or the sink keeps changelogs.
    """
    return tuple(_view(name, inner) for name, inner in section.mappings("views"))


def require_mirror(mode: str, views: tuple[ViewSettings, ...]) -> tuple[ViewSettings, ...]:
    """Refuse views over changelogs.

    :raises ConfigError: when there are any.
    """
    if views and mode != "mirror":
        raise ConfigError(
            "sink.views: a view is computed from a mirror, but sink.mode is changelog",
            "Set `sink.mode: mirror`, or add a second sink with a mirror and put the views there.",
        )
    return views


def _view(label: str, section: Section) -> ViewSettings:
    schema, dot, name = label.partition(".")
    if not (schema and dot and name):
        raise ConfigError(
            f"{section.path}: the name of a view needs a schema",
            "Name it like `schema.table`, for example `dwd.orders`.",
        )
    refresh = section.take("refresh", as_positive_seconds, 0.0)
    view = ViewSettings(
        schema,
        name,
        sql=section.take("sql", as_text),
        refresh=refresh or None,
        max_rows=section.take("max_rows", as_positive_integer, MAX_ROWS),
        indexes=cast(Literal["create", "print"], section.take("indexes", one_of("create", "print"), "create")),
    )
    section.finish()
    return view
