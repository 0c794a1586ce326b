"""The interfaces that a kind of source or sink registers: its section of the pipeline file, and its plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

if TYPE_CHECKING:  # where Dags are parsed, modules that they do not need are not loaded
    from airflow_cdc_provider.engine.core.findings import Checks
    from airflow_cdc_provider.engine.core.record import Mode, Target
    from airflow_cdc_provider.engine.core.section import Section
    from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
    from airflow_cdc_provider.engine.core.table import Table
    from airflow_cdc_provider.engine.sinks.contract import Sink


class SourceSettings(Protocol):
    """The ``source`` section of a pipeline file: a frozen dataclass of plain data, like :class:`SinkSettings`."""

    @property
    def type(self) -> str:
        """Return the name under which the source is registered."""

    @property
    def captured(self) -> tuple[str, ...]:
        """Return the tables or topics that are read, as the file names them."""

    @property
    def columns_key(self) -> str:
        """Return the path of the key that determines the columns of the tables, for messages."""

    @property
    def database(self) -> str | None:
        """Return the name of the database that is read, or ``None`` if the source has none."""

    @property
    def secrets(self) -> Sequence[str]:
        """Return texts that no log may show."""

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return the Spark configuration that the source needs; empty if it does not work in Spark's JVM."""

    @classmethod
    def parse(cls, section: Section, pipeline: str) -> Self:
        """Take the source's keys except ``type``; the caller refuses the remaining ones.

        :param pipeline: the pipeline's name, from which names at the source are derived.
        :raises ConfigError: if a key is missing or invalid; names the key's path and valid values.
        """

    def datasets(self, identity: Mapping[str, Any], table: Table) -> list[tuple[str, str]]:
        """Return the namespaces and names, in OpenLineage's terms, of the datasets that a table's rows come from.

        :param identity: the ``identity`` of the commit record.
        """


class SourceKind(Protocol):
    """A kind of source, created once without arguments for its name in ``source.type``.

    Its complete interface is :class:`.SourcePlugin`.
    """

    @property
    def settings(self) -> type[SourceSettings]:
        """Return the class of the section."""


class SinkSettings(Protocol):
    """The ``sink`` section of a pipeline file: a frozen dataclass of plain data; its behavior is a :class:`SinkPlugin`.

    It is hashable, and its ``repr`` omits secrets. If the file is not resolved, as where Dags are parsed, its values
    may contain variables as they are written in the file.
    """

    @property
    def type(self) -> str:
        """Return the name under which the sink is registered."""

    @property
    def mode(self) -> Mode:
        """Return the mode, which is either to keep tables equal or to append changes."""

    @property
    def schema(self) -> str:
        """Return the name of the target schema, in which ``{schema}`` is replaced by the source's schema."""

    @classmethod
    def parse(cls, section: Section) -> Self:
        """Take the sink's keys except ``type``, which has been taken; the caller refuses the remaining ones.

        :raises ConfigError: if a key is missing or invalid; names the key's path and valid values.
        """

    @property
    def place(self) -> str:
        """Return the address of the store without user or password, for messages."""

    @property
    def secrets(self) -> Sequence[str]:
        """Return texts that no log may show."""

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return the Spark configuration that the sink needs; settings of the pipeline file take precedence."""

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Return namespace and name of a target in OpenLineage's terms."""


S_contra = TypeVar("S_contra", contravariant=True)


class SinkPlugin(Protocol[S_contra]):
    """A kind of sink, created once without arguments for its name in ``sink.type``.

    Its module must not import a driver or a store, because it is also imported where Dags are parsed.
    """

    @property
    def settings(self) -> type[SinkSettings]:
        """Return the class of the section."""

    def open(self, settings: S_contra, pipeline: str, part: str = "") -> Sink:
        """Return the sink of a pipeline without connecting to the store.

        :param pipeline: the pipeline's name.
        :param part: the part of the run, if it has parts; sessions carry its name.
        """

    def check(
        self,
        settings: S_contra,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """Check store, privileges and targets without changing anything; one :meth:`.Checks.run` for each check.

        :param pipeline: the pipeline's name.
        :param targets: the targets of the tables; ``None`` if the tables are not known.
        :param source: the identity of the source; ``None`` if it cannot be reached.
        """


@runtime_checkable
class MaintainedSink(Protocol[S_contra]):
    """A kind of sink whose store needs regular maintenance, because units leave many small files in it."""

    def maintain(self, settings: S_contra, pipeline: str, retention: float | None) -> Sequence[Mapping[str, Any]]:
        """Merge small files, and remove files that no reader needs any more; the pipeline's jobs may keep running.

        :param pipeline: the pipeline's name.
        :param retention: seconds that replaced files are kept; the store's own setting by default.
        :returns: the actions taken, as JSON values.
        :raises GateClosed: if the pipeline has no commit record.
        """


@runtime_checkable
class SparkBound(Protocol):
    """Settings of a sink whose tables only Spark reads and writes, so that any command may have to start Spark."""

    def with_spark(self, conf: Mapping[str, str]) -> SinkSettings:
        """Return the settings with the configuration that Spark must be started with.

        :param conf: master and configuration of the file and of all its sinks.
        """


@runtime_checkable
class Naming(Protocol):
    """Settings of a sink whose rows name the database that they come from."""

    def with_database(self, name: str) -> SinkSettings:
        """Return the settings with the name of the source's database, unless they already have a name for it."""
