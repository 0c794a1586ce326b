"""The place where the driver of a Spark job runs, and the consequences for its submission.

In client mode the driver is a child of spark-submit. In cluster mode the cluster runs the driver: Airflow's
environment, files and signals do not reach it, and spark-submit may end before the driver does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.errors import SparkUnusable

LAUNCHER = "org.apache.spark.deploy.SparkSubmit"
"""Main class of the driver on a standalone cluster, which accepts no Python application: it submits one there."""
DOWNLOADED = "{{USER_JAR}}"
"""Placeholder in the arguments of such a driver for the path to which the cluster has downloaded its application."""

# With these settings spark-submit runs as long as the driver and prints its state, and no cluster manager restarts a
# driver: Airflow does that with a new submission.
_CLUSTER_CONF: Mapping[str, Mapping[str, str]] = {
    "spark": {
        "spark.standalone.submit.waitAppCompletion": "true",
        "spark.driver.supervise": "false",
        "spark.master.rest.enabled": "false",  # REST would pass only variables that begin with SPARK_
    },
    "yarn": {"spark.yarn.submit.waitAppCompletion": "true", "spark.yarn.maxAppAttempts": "1"},
    "k8s": {"spark.kubernetes.submission.waitAppCompletion": "true"},
}

# Names that Spark itself redacts in its logs and its UI, and further names of secrets.
_SECRET = re.compile(
    r"secret|password|passphrase|token|credential|jaas|[.]sas[.]|(access|account|private|encryption)[.]?key",
    re.IGNORECASE,
)

# A standalone cluster passes the whole environment of spark-submit to the driver, including addresses of this host.
_STANDALONE_VARIABLES = frozenset({"PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "JAVA_HOME"})
_STANDALONE_PATTERN = re.compile(r"(SPARK|PYSPARK|HADOOP)_(?!LOCAL_)")


@dataclass(frozen=True)
class Deployment:
    """The place where the driver of a job runs.

    :param master: URL of Spark's master.
    :param mode: ``client`` or ``cluster``.
    :raises SparkUnusable: if the mode does not exist for this master.
    """

    master: str
    mode: str

    def __post_init__(self) -> None:
        if self.mode not in ("client", "cluster"):
            raise SparkUnusable(f"the Spark connection has deploy-mode {self.mode!r}", "Set it to client or cluster.")
        if self.cluster and self.manager not in _CLUSTER_CONF:
            raise SparkUnusable(
                f"the Spark connection has deploy-mode cluster on {self.master}",
                f"Set it to client: only {', '.join(_CLUSTER_CONF)} can run the driver on a cluster.",
            )

    @property
    def cluster(self) -> bool:
        """Return whether the driver runs on the cluster."""
        return self.mode == "cluster"

    @property
    def standalone(self) -> bool:
        """Return whether the driver runs on a standalone cluster, which accepts no Python application."""
        return self.cluster and self.manager == "spark"

    @property
    def manager(self) -> str:
        """Return the cluster manager: ``local``, ``spark``, ``yarn`` or ``k8s``."""
        return self.master.partition(":")[0].partition("[")[0]

    @property
    def conf(self) -> Mapping[str, str]:
        """Return configuration that users cannot override."""
        return _CLUSTER_CONF[self.manager] if self.cluster else {}

    def environment(self, given: Mapping[str, str], secret: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of spark-submit.

        :param given: the environment of the task.
        :param secret: variables with which the driver reads the pipeline file; in cluster mode they are not passed, and
            must be set on the cluster.
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
        """Return the part of a configuration that must not be on a command line.

        :raises SparkUnusable: if a cluster would put it there.
        """
        found = {name: str(value) for name, value in conf.items() if _SECRET.search(name)}
        if found and self.standalone:
            raise SparkUnusable(
                "a standalone cluster shows the whole configuration of a driver in cluster mode, including"
                f" {', '.join(found)}",
                "Set these in spark-defaults.conf on the hosts of the cluster, or use client mode.",
            )
        return found

    def launched(self, name: str, script: str, arguments: list[str]) -> list[str]:
        """Return the arguments of a driver that is a :data:`LAUNCHER`, which already has the other configuration.

        :param name: the name of the application.
        :param script: URL of the driver's script; its library is the file that the cluster has downloaded.
        """
        where = ["--master", self.master, "--deploy-mode", "client", "--name", name]
        return [*where, "--py-files", DOWNLOADED, script, *arguments]
