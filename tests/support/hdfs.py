"""An HDFS for the tests of a module, with a jar that is fetched once: ``python -m tests.support.hdfs``.

This is Hadoop's own small cluster for tests, in the version of Spark's Hadoop client.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.jars import JarsMissing, fetch

SECONDS = 180.0
_SPARK_JARS = Path(pyspark.__file__).parent / "jars"
_CONFIG = "config.xml"


def cluster_jar() -> Path:
    """Return the jar of the small cluster, fetched if necessary; Spark includes all its dependencies."""
    (client,) = _SPARK_JARS.glob("hadoop-client-api-*.jar")
    version = client.stem.rpartition("-")[2]
    try:
        jars = fetch(f"org.apache.hadoop:hadoop-client-minicluster:{version}")
    except JarsMissing as e:
        pytest.skip(e.message)
    return next(jar for jar in jars if jar.name.endswith(f"hadoop-client-minicluster-{version}.jar"))


@dataclass(frozen=True)
class HdfsCluster:
    """A NameNode with a DataNode, on their own ports.

    :param url: URL of its root, for REST.
    :param hadoop: URL of its root, for Hadoop's own protocol.
    """

    url: str
    hadoop: str
    directory: Path
    process: psutil.Process

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[HdfsCluster]:
        """Start a cluster whose superuser is any client without a user name.

        :param directory: an empty directory for its files.
        """
        config, log = directory / _CONFIG, directory / "log"
        options = {
            "hdfs.minidfs.basedir": directory / "data",
            "hadoop.http.staticuser.user": getpass.getuser(),
            # How long a writer waits before it asks again, if the NameNode does not know of a block yet.
            "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": 10,
        }
        arguments = _java("org.apache.hadoop.test.MiniDFSClusterManager", "-format", "-writeConfig", str(config))
        for name, value in options.items():
            arguments += ["-D", f"{name}={value}"]
        with log.open("wb") as out:
            cluster = subprocess.Popen(arguments, cwd=directory, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            # The configuration is written when everything is running.
            await_condition(lambda: bool(_properties(config)) or cluster.poll() is not None, SECONDS)
            properties = _properties(config)
            assert properties, log.read_text(encoding="utf-8")[-4000:]
            url = f"webhdfs://{properties['dfs.namenode.http-address']}"
            yield cls(url, properties["fs.defaultFS"], directory, psutil.Process(cluster.pid))
        finally:
            cluster.kill()
            cluster.wait()

    def administer(self, *arguments: str) -> None:
        """Run ``hdfs dfsadmin``."""
        command = _java("org.apache.hadoop.hdfs.tools.DFSAdmin", "-conf", str(self.directory / _CONFIG), *arguments)
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Halt the cluster."""
        self.process.suspend()
        # The threads of a process stop one after the other, and each may still answer until then.
        tasks = Path(f"/proc/{self.process.pid}/task")
        assert await_condition(
            lambda: all(file.read_text().rpartition(")")[2].split()[0] == "T" for file in tasks.glob("*/stat")), SECONDS
        )
        try:
            yield
        finally:
            self.process.resume()


def _java(main: str, *arguments: str) -> list[str]:
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else Path("java")
    options = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    return [str(java), *options, "-cp", f"{cluster_jar()}:{_SPARK_JARS}/*", main, *arguments]


def _properties(config: Path) -> dict[str, str]:
    """Return the contents of a Hadoop configuration file, once it has been written completely."""
    try:
        found = ET.parse(config).findall("property")
    except (FileNotFoundError, ET.ParseError):
        return {}
    return {each.findtext("name", ""): each.findtext("value", "") for each in found}


if __name__ == "__main__":
    try:
        cluster_jar()
    except pytest.skip.Exception as e:
        sys.exit(str(e))
