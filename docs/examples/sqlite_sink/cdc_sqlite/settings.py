"""The ``sink`` section of a pipeline file for SQLite."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from airflow_cdc_provider.engine.core.section_values import as_text, one_of

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.section import Section


@dataclass(frozen=True)
class SqliteSettings:
    """See ``SinkSettings``; ``path`` is that of the database file, absolute."""

    path: str
    mode: Literal["mirror"] = "mirror"
    schema: str = "{schema}"
    type: Literal["sqlite"] = "sqlite"

    @classmethod
    def parse(cls, section: Section) -> Self:
        """Take the section's keys; a mode that the sink lacks is refused by its name."""
        section.take("mode", one_of("mirror"), "mirror")
        return cls(
            path=os.path.abspath(section.take("path", as_text)),
            schema=section.take("schema", as_text, "{schema}"),
        )

    @property
    def place(self) -> str:
        """The file, for messages."""
        return self.path

    @property
    def secrets(self) -> Sequence[str]:
        """None: a file has no password."""
        return ()

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Nothing: rows do not pass through the JVM."""
        return {}

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Namespace and name of a target table in OpenLineage's terms."""
        return f"sqlite:{self.path}", f"{schema}.{name}"
