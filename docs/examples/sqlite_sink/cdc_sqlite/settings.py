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
    """The keys of the section; implements ``SinkSettings``.

    :param path: absolute path of the database file.
    """

    path: str
    mode: Literal["mirror"] = "mirror"
    schema: str = "{schema}"
    type: Literal["sqlite"] = "sqlite"

    @classmethod
    def parse(cls, section: Section) -> Self:
        """Take the keys of the section; refuse a mode other than ``mirror``."""
        section.take("mode", one_of("mirror"), "mirror")
        return cls(
            path=os.path.abspath(section.take("path", as_text)),
            schema=section.take("schema", as_text, "{schema}"),
        )

    @property
    def place(self) -> str:
        """Return the file's path, for messages."""
        return self.path

    @property
    def secrets(self) -> Sequence[str]:
        """Return nothing: a file has no password."""
        return ()

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return nothing: rows do not pass through the JVM."""
        return {}

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Return the OpenLineage namespace and name of a target table."""
        return f"sqlite:{self.path}", f"{schema}.{name}"
