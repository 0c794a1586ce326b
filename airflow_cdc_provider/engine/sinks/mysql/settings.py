"""The ``sink`` section of a pipeline file for MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self, cast

from airflow_cdc_provider.engine.core.record import Mode
from airflow_cdc_provider.engine.core.section_values import as_text, one_of
from airflow_cdc_provider.engine.views.settings import ViewSettings, require_mirror, take_views

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.section import Section


def as_mysql_uri(value: object) -> str:
    """Check a MySQL URI, which may contain a password and is never repeated in a message."""
    from airflow_cdc_provider.engine.sinks.mysql.address import Address

    text = as_text(value)
    Address.parse(text)
    return text


@dataclass(frozen=True)
class MysqlSettings:
    """Settings of a MySQL sink; ``dsn`` is ``mysql://user:password@host:port/``, ``schema`` names a database.

    :param views: the views over the mirror.
    """

    dsn: str = field(repr=False)
    mode: Mode = "mirror"
    schema: str = "{schema}"
    type: Literal["mysql"] = "mysql"
    views: tuple[ViewSettings, ...] = ()

    @classmethod
    def parse(cls, section: Section) -> Self:
        """Parse the section."""
        mode = cast(Mode, section.take("mode", one_of("mirror", "changelog"), "mirror"))
        return cls(
            dsn=section.dsn(as_mysql_uri, "mysql", "MySQL"),
            mode=mode,
            schema=section.take("schema", as_text, "{schema}"),
            views=require_mirror(mode, take_views(section)),
        )

    @property
    def place(self) -> str:
        """Return the server, for messages."""
        from airflow_cdc_provider.engine.sinks.mysql.address import Address

        return Address.parse(self.dsn).place

    @property
    def secrets(self) -> Sequence[str]:
        """Return the password, which must not appear in logs."""
        from airflow_cdc_provider.engine.sinks.mysql.address import Address

        password = Address.parse(self.dsn).password
        return (password,) if password else ()

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return no configuration: rows are written without the JVM."""
        return {}

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Return the dataset of a target table."""
        return f"mysql://{self.place}", f"{schema}.{name}"
