"""The ``sink`` section of a pipeline file for files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, cast

from airflow_cdc_provider.engine.core.record import Mode
from airflow_cdc_provider.engine.core.section_values import as_text
from airflow_cdc_provider.engine.sinks.lake.paths import as_path, folder

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.section import Section

FileFormat = Literal["parquet", "json"]


@dataclass(frozen=True)
class FilesSettings:
    """Settings of a files sink.

    :param path: the directory that contains everything: a local path, or a URL for fsspec. It must not contain
        credentials, which fsspec's libraries find in their usual places.
    """

    path: str
    format: FileFormat = "parquet"
    schema: str = "{schema}"
    mode: Mode = "changelog"
    type: Literal["files"] = "files"

    @classmethod
    def parse(cls, section: Section) -> Self:
        """Parse the section."""
        section.take("mode", _changelog, "changelog")
        return cls(
            path=section.take("path", as_path),
            format=cast(FileFormat, section.take("format", _as_format, "parquet")),
            schema=section.take("schema", as_text, "{schema}"),
        )

    @property
    def place(self) -> str:
        """Return the path, for messages."""
        return self.path

    @property
    def secrets(self) -> Sequence[str]:
        """Return no secrets."""
        return ()

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return no configuration: files are written without the JVM."""
        return {}

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Return the dataset of a target."""
        scheme, separator, rest = self.path.partition("://")
        bucket, _, path = rest.partition("/")
        if not separator or scheme in ("file", "local"):
            return "file", f"{(rest or scheme).rstrip('/')}/{folder(schema, name)}"
        return f"{scheme}://{bucket}", f"{path.strip('/')}/{folder(schema, name)}".lstrip("/")


def _changelog(value: object) -> str:
    if value != "changelog":
        raise ValueError("changelog: files are only added, never changed; for mirrors use `type: delta`")
    return "changelog"


def _as_format(value: object) -> str:
    if value not in ("parquet", "json"):
        raise ValueError("parquet or json")
    return str(value)
