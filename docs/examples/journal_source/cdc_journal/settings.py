"""The ``source`` section of a pipeline file for a journal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from airflow_cdc_provider.engine.core.section_values import as_text

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.section import Section
    from airflow_cdc_provider.engine.core.table import Table


@dataclass(frozen=True)
class JournalSettings:
    """The keys of the section; implements ``SourceSettings``.

    :param path: absolute path of the database file.
    :param table: name of the table.
    """

    path: str
    table: str
    type: Literal["journal"] = "journal"
    columns_key: ClassVar[str] = "source.table"

    @classmethod
    def parse(cls, section: Section, pipeline: str) -> Self:
        """Take the keys of the section."""
        return cls(path=os.path.abspath(section.take("path", as_text)), table=section.take("table", as_text))

    @property
    def captured(self) -> tuple[str, ...]:
        """Return the name of the table."""
        return (self.table,)

    @property
    def database(self) -> None:
        """Return nothing: a file has no database name."""

    @property
    def secrets(self) -> Sequence[str]:
        """Return nothing: a file has no password."""
        return ()

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return nothing: rows do not pass through the JVM."""
        return {}

    def datasets(self, identity: Mapping[str, Any], table: Table) -> list[tuple[str, str]]:
        """Return the OpenLineage namespace and name of the table."""
        return [(f"sqlite:{self.path}", self.table)]
