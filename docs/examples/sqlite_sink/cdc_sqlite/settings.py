"""The ``sink`` section of a pipeline file for SQLite: what the entry point names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from airflow_cdc_provider.engine.core.errors import ConfigError, ConnectionFailed, MissingPrivilege
from airflow_cdc_provider.engine.core.section_values import as_text, one_of

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.findings import Checks
    from airflow_cdc_provider.engine.core.section import Section
    from airflow_cdc_provider.engine.core.table import Table
    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
    from airflow_cdc_provider.engine.postgres.connection import Connection
    from airflow_cdc_provider.engine.sinks.contract import Sink


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

    def open(self, pipeline: str, part: str = "") -> Sink:
        """The place of a pipeline in the file; SQLite has no sessions that could carry the part's name."""
        from cdc_sqlite.sink import SqliteSink  # late: pyarrow is not for where Dags are parsed

        return SqliteSink(self.path, pipeline)

    def check(
        self, checks: Checks, source: Connection | None, pipeline: Pipeline, tables: Sequence[Table] | None
    ) -> None:
        """Look at the file and the names, changing nothing."""
        checks.run("sink", partial(_usable, Path(self.path)))
        checks.run("sink names", partial(_names, tables or ()))

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Namespace and name of a target table in OpenLineage's terms."""
        return f"sqlite:{self.path}", f"{schema}.{name}"


def _usable(path: Path) -> str:
    if not path.parent.is_dir():
        raise ConfigError(f"sink.path: there is no folder {path.parent}", "Create it, or give another path.")
    # SQLite makes two more files beside its own.
    if not all(os.access(each, os.W_OK) for each in (path.parent, path) if each.exists()):
        raise MissingPrivilege(f"{path} or its folder cannot be written", "Let the pipeline's user write both.")
    if path.is_file() and path.stat().st_size and not _begins(path):
        raise ConnectionFailed(f"{path} is no SQLite database", "Give sink.path another file.")
    return f"sink {path} can be written."


def _names(tables: Sequence[Table]) -> str:
    """SQLite takes names for one that differ in case only."""
    for table in tables:
        if len({column.name.lower() for column in table.columns}) < len(table.columns):
            raise ConfigError(
                f"source.tables: columns of {table.label} have names that differ in case only, which are one to SQLite",
                "Leave all of them but one out with `columns`.",
            )
    if len({table.label.lower() for table in tables}) < len(tables):
        raise ConfigError(
            "source.tables: names of tables differ in case only, which are one to SQLite",
            "Copy one of them in another pipeline, with another sink.schema.",
        )
    return "SQLite can tell all names apart."


def _begins(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"
