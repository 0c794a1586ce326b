"""The plugin that the entry point names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.core.errors import ConfigError, ConnectionFailed, MissingPrivilege
from cdc_sqlite.settings import SqliteSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.findings import Checks
    from airflow_cdc_provider.engine.core.record import Target
    from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
    from cdc_sqlite.sink import SqliteSink


class SqlitePlugin:
    """The sink type ``sqlite``; implements ``SinkPlugin``."""

    settings = SqliteSettings

    def open(self, settings: SqliteSettings, pipeline: str, part: str = "") -> SqliteSink:
        """Return the sink of a pipeline; ``part`` is unused, as SQLite has no session names."""
        from cdc_sqlite.sink import SqliteSink  # late, so that parsing Dags does not import pyarrow

        return SqliteSink(settings.path, pipeline)

    def check(
        self,
        settings: SqliteSettings,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """Check the file and the names without changing anything."""
        checks.run("sink", partial(_usable, Path(settings.path)))
        checks.run("sink names", partial(_names, targets or ()))


def _usable(path: Path) -> str:
    if not path.parent.is_dir():
        raise ConfigError(f"sink.path: there is no folder {path.parent}", "Create it, or set another path.")
    # SQLite creates two more files next to the database file.
    if not all(os.access(each, os.W_OK) for each in (path.parent, path) if each.exists()):
        raise MissingPrivilege(f"{path} or its folder cannot be written", "Let the pipeline's user write to both.")
    if path.is_file() and path.stat().st_size and not _begins(path):
        raise ConnectionFailed(f"{path} is not an SQLite database", "Point `sink.path` to another file.")
    return f"sink {path} can be written."


def _names(targets: Sequence[Target]) -> str:
    """Refuse names that differ in case only, because SQLite treats them as equal."""
    tables = [target.table for target in targets]
    for table in tables:
        if len({column.name.lower() for column in table.columns}) < len(table.columns):
            raise ConfigError(
                f"source.tables: columns of {table.label} have names that differ in case only, and SQLite ignores case",
                "Select only one of them with `columns`.",
            )
    if len({table.label.lower() for table in tables}) < len(tables):
        raise ConfigError(
            "source.tables: names of tables differ in case only, and SQLite ignores case",
            "Copy one of them in another pipeline with a different `sink.schema`.",
        )
    return "SQLite can tell all names apart."


def _begins(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"
