"""The section ``spark`` of a pipeline file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# A JVM that runs out of memory loses some of its threads and may hang forever, but a killed JVM is noticed. (The flag
# ExitOnOutOfMemoryError is not used because its exit code is 3.) By default the JVM reports this on standard output.
END_WITHOUT_MEMORY = "-XX:+DisplayVMOutputToStderr -XX:OnOutOfMemoryError='kill -9 %p'"
ONE_COMPILER = "-XX:TieredStopAtLevel=1"


@dataclass(frozen=True)
class SparkSettings:
    """Spark's master and configuration for runs without ``spark-submit``, and the work for which Spark is started.

    :param min_rows: rows to copy from which Spark is started; less is copied by the process that runs the command.
    :param min_bytes: bytes to copy, or of the log to read, from which Spark is started.
    """

    master: str = "local[2]"
    conf: Mapping[str, str] = field(default_factory=dict)
    min_rows: int = 500_000
    min_bytes: int = 64 << 20


@dataclass(frozen=True)
class SparkStart:
    """The start parameters of Spark for a pipeline.

    :param name: the pipeline's name.
    :param conf: Spark's configuration, see :meth:`.Pipeline.spark_conf_on`.
    """

    name: str
    master: str
    conf: Mapping[str, str]


def runs_locally(master: str) -> bool:
    """Return whether Spark's tasks run in the driver's own JVM."""
    return master == "local" or master.startswith("local[")
