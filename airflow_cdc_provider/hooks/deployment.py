"""Where the driver of a Spark job runs, and what that means for how it is submitted.

In client mode the driver is a child of spark-submit. In cluster mode the cluster runs it: Airflow's environment, files
and signals do not reach it, and the end of spark-submit is not its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.errors import SparkUnusable

LAUNCHER = "org.apache.spark.deploy.SparkSubmit"
"""Main class of the driver on a standalone cluster, which takes no Python application: it submits one, there."""
DOWNLOADED = "{{USER_JAR}}"
"""In the arguments of such a driver: the path to which the cluster has downloaded its application."""

# Each manager lets spark-submit stay as long as the driver, whose state it prints. None begins a driver again: Airflow
# does, with a submission of its own.
_CLUSTER_CONF: Mapping[str, Mapping[str, str]] = {
    "spark": {
        "spark.standalone.submit.waitAppCompletion": "true",
        "spark.driver.supervise": "false",
        "spark.master.rest.enabled": "false",  # lets only variables through that begin with SPARK_
    },
    "yarn": {"spark.yarn.submit.waitAppCompletion": "true", "spark.yarn.maxAppAttempts": "1"},
    "k8s": {"spark.kubernetes.submission.waitAppCompletion": "true"},
}

# What Spark itself keeps out of its logs and its UI, and what holds secrets beside that.
_SECRET = re.compile(
    r"secret|password|passphrase|token|credential|jaas|[.]sas[.]|(access|account|private|encryption)[.]?key",
    re.IGNORECASE,
)

# A standalone cluster gives the driver the whole environment of spark-submit, also its addresses of this host.
_STANDALONE_VARIABLES = frozenset({"PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "JAVA_HOME"})
_STANDALONE_PATTERN = re.compile(r"(SPARK|PYSPARK|HADOOP)_(?!LOCAL_)")


@dataclass(frozen=True)
class Deployment:
    """Where the driver of a job runs.

    :param master: URL of Spark's master.
    :param mode: ``client`` or ``cluster``.
    :raises SparkUnusable: when there is no such thing.
    """

    master: str
    mode: str

    def __post_init__(self) -> None:
        if self.mode not in ("client", "cluster"):
            raise SparkUnusable(
                f"the Spark connection asks for deploy-mode {self.mode!r}", "Ask for client or cluster there."
            )
        if self.cluster and self.manager not in _CLUSTER_CONF:
            raise SparkUnusable(
                f"the Spark connection asks for deploy-mode cluster on {self.master}",
                f"Only {', '.join(_CLUSTER_CONF)} have a cluster for the driver. Ask for client there.",
            )

    @property
    def cluster(self) -> bool:
        """Whether the driver runs on the cluster."""
        return self.mode == "cluster"

    @property
    def standalone(self) -> bool:
        """Whether the driver is one of a standalone cluster, which takes no Python application."""
        return self.cluster and self.manager == "spark"

    @property
    def manager(self) -> str:
        """``local``, ``spark``, ``yarn`` or ``k8s``."""
        return self.master.partition(":")[0].partition("[")[0]

    @property
    def conf(self) -> Mapping[str, str]:
        """Configuration that is not the user's to choose."""
        return _CLUSTER_CONF[self.manager] if self.cluster else {}

    def environment(self, given: Mapping[str, str], secret: Mapping[str, str]) -> dict[str, str]:
        """The environment of spark-submit.

        :param given: that of the task.
        :param secret: with which the driver reads the pipeline file; on a cluster that has to know them itself.
        """
        if not self.cluster:
            return {**given, **secret}
        rest = {name: value for name, value in given.items() if name not in secret}
        if not self.standalone:
            return rest
        return {
            name: value
            for name, value in rest.items()
            if name in _STANDALONE_VARIABLES or (_STANDALONE_PATTERN.match(name) and not _SECRET.search(name))
        }

    def secrets(self, conf: Mapping[str, str]) -> dict[str, str]:
        """The part of a configuration that must not stand on a command line.

        :raises SparkUnusable: when a cluster would put it there.
        """
        found = {name: str(value) for name, value in conf.items() if _SECRET.search(name)}
        if found and self.standalone:
            raise SparkUnusable(
                f"a standalone cluster shows all configuration of a driver in cluster mode, {', '.join(found)} as well",
                "Set it in spark-defaults.conf on the hosts of the cluster, or ask for client mode.",
            )
        return found

    def launched(self, name: str, script: str, arguments: list[str]) -> list[str]:
        """The arguments of a driver that is a :data:`LAUNCHER`, which has the rest of the configuration already.

        :param name: of the application.
        :param script: URL of the driver's script; its library is what the cluster has downloaded.
        """
        where = ["--master", self.master, "--deploy-mode", "client", "--name", name]
        return [*where, "--py-files", DOWNLOADED, script, *arguments]
