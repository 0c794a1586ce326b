"""What a kind of sources or of sinks registers: the section of the pipeline file, and what works by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

if TYPE_CHECKING:  # where Dags are parsed nothing is loaded that they do not need
    from airflow_cdc_provider.engine.core.findings import Checks
    from airflow_cdc_provider.engine.core.record import Mode, Target
    from airflow_cdc_provider.engine.core.section import Section
    from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
    from airflow_cdc_provider.engine.core.table import Table
    from airflow_cdc_provider.engine.sinks.contract import Sink


class SourceSettings(Protocol):
    """The ``source`` section of a pipeline file: a frozen dataclass, and data, as :class:`SinkSettings`."""

    @property
    def type(self) -> str:
        """Name under which the source is registered."""

    @property
    def captured(self) -> tuple[str, ...]:
        """What is read, as the file names it."""

    @property
    def columns_key(self) -> str:
        """Path of the key that decides which columns the tables have, for messages."""

    @property
    def database(self) -> str | None:
        """Name of the database that is read; ``None`` where the source has no such name."""

    @property
    def secrets(self) -> Sequence[str]:
        """Texts that no log may show."""

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """What the source needs of Spark's configuration; empty where it does not work in Spark's JVM."""

    @classmethod
    def parse(cls, section: Section, pipeline: str) -> Self:
        """Take the source's keys, but for ``type``; those that are left are refused by the caller.

        :param pipeline: its name, of which names at the source are made.
        :raises ConfigError: naming the key's path, the value and what would be right.
        """

    def datasets(self, identity: Mapping[str, Any], table: Table) -> list[tuple[str, str]]:
        """Namespaces and names, in OpenLineage's terms, of what the rows of a table come from.

        :param identity: what the commit record says of the source.
        """


class SourceKind(Protocol):
    """A kind of sources: made once, without arguments, by the name in ``source.type``.

    What works by it is :class:`.SourcePlugin`.
    """

    @property
    def settings(self) -> type[SourceSettings]:
        """The class of the section."""


class SinkSettings(Protocol):
    """The ``sink`` section of a pipeline file: a frozen dataclass. It is data: a :class:`SinkPlugin` works by it.

    It can be hashed, and its ``repr`` leaves secrets out. What is left of it in a file that is not resolved, as where
    Dags are parsed, may hold variables as they are written.
    """

    @property
    def type(self) -> str:
        """Name under which the sink is registered."""

    @property
    def mode(self) -> Mode:
        """Whether tables are kept equal or changes appended."""

    @property
    def schema(self) -> str:
        """Name of the target schema, in which ``{schema}`` stands for the source's."""

    @classmethod
    def parse(cls, section: Section) -> Self:
        """Take the sink's keys, but for ``type``, which has been taken; those that are left are refused by the caller.

        :raises ConfigError: naming the key's path, the value and what would be right.
        """

    @property
    def place(self) -> str:
        """Where the store is, without user or password, for messages."""

    @property
    def secrets(self) -> Sequence[str]:
        """Texts that no log may show."""

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """What the sink needs of Spark's configuration; the pipeline file's own settings win."""

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Namespace and name of a target in OpenLineage's terms."""


S_contra = TypeVar("S_contra", contravariant=True)


class SinkPlugin(Protocol[S_contra]):
    """A kind of sinks: made once, without arguments, by the name in ``sink.type``.

    Importing its module imports neither driver nor store, as that is done where Dags are parsed.
    """

    @property
    def settings(self) -> type[SinkSettings]:
        """The class of the section."""

    def open(self, settings: S_contra, pipeline: str, part: str = "") -> Sink:
        """Return the place of a pipeline in the store; nothing is connected yet.

        :param pipeline: its name.
        :param part: of the run, where it has parts: sessions carry its name.
        """

    def check(
        self,
        settings: S_contra,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """Check store, privileges and targets, changing nothing; one :meth:`.Checks.run` for each.

        :param pipeline: its name.
        :param targets: what the tables will be written to; ``None`` when the tables are not known.
        :param source: what is read; ``None`` when it cannot be asked.
        """


@runtime_checkable
class Maintained(Protocol[S_contra]):
    """A kind of sinks whose store has to be tidied now and then, since units leave many small files in it."""

    def maintain(self, settings: S_contra, pipeline: str, retention: float | None) -> Sequence[Mapping[str, Any]]:
        """Join small files, and remove what no reader needs any more; the pipeline's jobs may go on meanwhile.

        :param pipeline: its name.
        :param retention: seconds that files stay after others have taken their place; the store's own by default.
        :returns: what was done, as JSON values.
        :raises GateClosed: when the pipeline has no commit record.
        """


@runtime_checkable
class SparkBound(Protocol):
    """Settings of a sink whose tables only Spark reads and writes, so that any command may have to start one."""

    def with_spark(self, conf: Mapping[str, str]) -> SinkSettings:
        """Return the settings with what a Spark has to be started with.

        :param conf: master and configuration, of the file and of all its sinks.
        """


@runtime_checkable
class Naming(Protocol):
    """Settings of a sink whose rows say which database they come from."""

    def with_database(self, name: str) -> SinkSettings:
        """Return the settings with the name of the source's database, unless they have another one for it."""
