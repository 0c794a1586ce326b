"""What a kind of sink makes of the ``sink`` section of a pipeline file.

This is what a sink registers, see :mod:`.registry`: everything that is told of the store before it is asked, and
how to open and check it. The module of the class is read wherever pipeline files are, also where Dags are parsed, so
it imports drivers and pyarrow late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.findings import Checks
    from airflow_cdc_provider.engine.core.section import Section
    from airflow_cdc_provider.engine.core.table import Table
    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
    from airflow_cdc_provider.engine.postgres.connection import Connection
    from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.core.record import Mode


class SinkSettings(Protocol):
    """The ``sink`` section of a pipeline file: a frozen dataclass.

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

    def open(self, pipeline: str, part: str = "") -> Sink:
        """The place of a pipeline in the store; nothing is connected yet.

        :param pipeline: its name.
        :param part: of the run, where it has parts: sessions carry its name.
        """

    def check(
        self, checks: Checks, source: Connection | None, pipeline: Pipeline, tables: Sequence[Table] | None
    ) -> None:
        """Check store, privileges and targets, changing nothing; one :meth:`.Checks.run` for each.

        :param source: ``None`` when it cannot be reached.
        :param tables: that will be captured; ``None`` when they are not known.
        """

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Namespace and name of a target in OpenLineage's terms."""


@runtime_checkable
class SparkBound(Protocol):
    """Settings of a sink whose tables only Spark reads and writes, so that any command may have to start one."""

    def with_spark(self, conf: Mapping[str, str]) -> SinkSettings:
        """The settings with what a Spark has to be started with.

        :param conf: master and configuration, of the file and of all its sinks.
        """


@runtime_checkable
class Naming(Protocol):
    """Settings of a sink whose rows say which database they come from."""

    def with_database(self, name: str) -> SinkSettings:
        """Return the settings with the name of the source's database, unless they have another one for it."""


@runtime_checkable
class Maintained(Protocol):
    """Settings of a sink whose store has to be tidied now and then, since units leave many small files in it."""

    def maintain(self, pipeline: str, retention: float | None) -> Sequence[Mapping[str, Any]]:
        """Join small files, and remove what no reader needs any more; the pipeline's jobs may go on meanwhile.

        :param pipeline: its name.
        :param retention: seconds that files stay after others have taken their place; the store's own by default.
        :returns: what was done, as JSON values.
        :raises GateClosed: when the pipeline has no commit record.
        """
