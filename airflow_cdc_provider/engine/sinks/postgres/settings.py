"""The ``sink`` section of a pipeline file for Postgres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self, cast

from airflow_cdc_provider.engine.core.record import Mode
from airflow_cdc_provider.engine.core.section_values import as_postgres_uri, as_text, one_of
from airflow_cdc_provider.engine.views.settings import ViewSettings, require_mirror, take_views

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.section import Section


@dataclass(frozen=True)
class PostgresSettings:
    """Settings of a Postgres sink; ``dsn`` is a libpq URI with its variables and connection id resolved.

    :param types: ``convert`` accepts target tables whose types do not keep the source's values.
    :param views: the views over the mirror.
    """

    dsn: str = field(repr=False)
    mode: Mode = "mirror"
    schema: str = "{schema}"
    types: Literal["keep", "convert"] = "keep"
    views: tuple[ViewSettings, ...] = ()
    type: Literal["postgres"] = "postgres"

    @classmethod
    def parse(cls, section: Section) -> Self:
        """Parse the section."""
        mode = cast(Mode, section.take("mode", one_of("mirror", "changelog"), "mirror"))
        return cls(
            dsn=section.dsn(as_postgres_uri, "postgresql", "Postgres"),
            mode=mode,
            schema=section.take("schema", as_text, "{schema}"),
            types=cast(Literal["keep", "convert"], section.take("types", one_of("keep", "convert"), "keep")),
            views=require_mirror(mode, take_views(section)),
        )

    @property
    def place(self) -> str:
        """Return the database, for messages."""
        from airflow_cdc_provider.engine.postgres.connection import describe

        return describe(self.dsn)

    @property
    def secrets(self) -> Sequence[str]:
        """Return the passwords, which must not appear in logs."""
        from airflow_cdc_provider.engine.postgres.connection import passwords

        return passwords(self.dsn)

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return no configuration: rows are written without the JVM."""
        return {}

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Return the dataset of a target table."""
        from airflow_cdc_provider.engine.postgres.connection import dataset

        return dataset(self.dsn, schema, name)
