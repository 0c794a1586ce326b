"""The section ``spark`` of a pipeline file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# A JVM that has run out of memory loses any of its threads and may hang for ever; one that is killed is noticed. (The
# flag ExitOnOutOfMemoryError would do, but for its exit code, which is 3.) It says so on standard output, unless told.
END_WITHOUT_MEMORY = "-XX:+DisplayVMOutputToStderr -XX:OnOutOfMemoryError='kill -9 %p'"
ONE_COMPILER = "-XX:TieredStopAtLevel=1"


@dataclass(frozen=True)
class SparkSettings:
    """Spark's master and configuration for runs without ``spark-submit``."""

    master: str = "local[2]"
    conf: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SparkStart:
    """What Spark is started with for a pipeline.

    :param name: the pipeline's.
    :param conf: see :meth:`.Pipeline.spark_conf_on`.
    """

    name: str
    master: str
    conf: Mapping[str, str]


def runs_locally(master: str) -> bool:
    """Whether Spark's tasks run in the driver's own JVM."""
    return master == "local" or master.startswith("local[")
