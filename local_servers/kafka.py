"""Runs a temporary Kafka broker in its own directory, like the server of :mod:`.postgres`.

This is Apache Kafka from the jars on Maven Central, with broker and controller in one process and no other services
(KRaft). It listens on free ports of loopback, and writes only to its directory.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyspark
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from local_servers.jars import HOME, fetch
from local_servers.process import Account, ServerError, ServerProcess, claim_directory, find_free_port, run_as

# When 4.3.1 is killed at the wrong moment, a committed transaction may stay open forever (KAFKA-20734).
VERSION = "4.0.2"
PACKAGE = f"org.apache.kafka:kafka_2.13:{VERSION}"

# One broker holds all replicas. With few partitions in its internal topics it starts sooner.
SETTINGS: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    # After a crash, a broker is admitted again only when its previous session has expired.
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    "group.initial.rebalance.delay.ms": "0",
    # An idle broker need not write a record every half second.
    "metadata.max.idle.interval.ms": "0",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "3",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
}

_JAVA_OPTIONS = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_SPARK_JARS = Path(pyspark.__file__).parent / "jars"
_OF_SPARK = ("scala-library", "slf4j-api", "log4j-api", "log4j-core", "log4j-slf4j2-impl")
_LOGGING = ("slf4j", "log4j")
_NODE = 1
_ANSWER_SECONDS = 1.0
_LISTENERS = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", "LOGIN": "SASL_PLAINTEXT"}
_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


@dataclass(frozen=True)
class Login:
    """A user of the listener with authentication, who may do nothing without a grant."""

    user: str
    password: str = field(repr=False)

    @property
    def settings(self) -> dict[str, str]:
        """Return the broker's settings that admit the user, and that allow everything to anonymous clients."""
        password = re.sub(r'(["\\])', r"\\\1", self.password)
        return {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.login.plain.sasl.jaas.config": f'{_PLAIN} required user_{self.user}="{password}";',
        }


class KafkaServer(ServerProcess):
    """One broker with its directory; :meth:`create` makes it.

    :ivar port: port of the listener without authentication, which allows everything.
    :ivar login_port: port of the listener that requires a user and a password, if there is one.
    :ivar cluster: the broker's id of its cluster.
    """

    name = "Kafka"

    def __init__(
        self, directory: Path, port: int, login_port: int | None, cluster: str, account: Account, java: Sequence[str]
    ) -> None:
        super().__init__(directory, port, account)
        self.login_port = login_port
        self.cluster = cluster
        self._java = java

    @classmethod
    def create(
        cls, directory: Path, settings: Mapping[str, str] | None = None, login: Login | None = None
    ) -> KafkaServer:
        """Prepare a broker in ``directory``, which is new or empty, without starting it.

        :param settings: settings of the broker, which override :data:`SETTINGS`.
        :param login: a user, for whom the broker gets a second listener.
        :raises JarsMissing: if Kafka cannot be fetched.
        :raises ServerError: if Java is missing, or Kafka does not run here.
        """
        directory, account = claim_directory(directory, cls.name)
        scratch = directory / "tmp"
        scratch.mkdir()
        account.own(scratch)
        # Native libraries are unpacked there, and remain after a crash.
        options = (*_JAVA_OPTIONS, f"-Djava.io.tmpdir={scratch}", "-cp", _class_path(directory, account))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        login_port = find_free_port() if login else None
        server = cls(directory, find_free_port(), login_port, cluster, account, (_java(), *options))
        server._write_settings(settings or {}, login)
        server._format()
        return server

    def _write_settings(self, settings: Mapping[str, str], login: Login | None) -> None:
        ports = {"PLAINTEXT": self.port, "CONTROLLER": find_free_port()}
        if self.login_port is not None:
            ports["LOGIN"] = self.login_port
        given = {
            **SETTINGS,
            "process.roles": "broker,controller",
            "node.id": str(_NODE),
            "controller.quorum.voters": f"{_NODE}@127.0.0.1:{ports['CONTROLLER']}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items()),
            "listener.security.protocol.map": ",".join(f"{name}:{kind}" for name, kind in _LISTENERS.items()),
            "log.dirs": str(self.data_directory),
            **(login.settings if login else {}),
            **settings,
        }
        lines = [f"{name}={value}\n".replace("\\", "\\\\") for name, value in given.items()]
        # Java reads such files in this encoding, with all other characters escaped.
        self._file.write_text("".join(lines), encoding="latin-1", errors="backslashreplace")
        self._file.chmod(0o600)
        self.account.own(self._file)

    def _format(self) -> None:
        # The id of a cluster may start with a hyphen.
        tool = ("kafka.tools.StorageTool", "format", f"--cluster-id={self.cluster}", f"--config={self._file}")
        done = run_as(self.account, [*self._java, *tool], self.directory)
        if done.returncode != 0:
            raise ServerError(
                f"Kafka's storage tool failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}".rstrip(),
                "Correct the setting that it names. Otherwise check that Java is 17 or newer and the disk has space.",
            )

    @property
    def _file(self) -> Path:
        return self.directory / "server.properties"

    @property
    def brokers(self) -> str:
        """Return the address of the listener without authentication."""
        return f"127.0.0.1:{self.port}"

    @property
    def login_brokers(self) -> str:
        """Return the address of the listener with authentication."""
        return f"127.0.0.1:{self.login_port}"

    def command(self) -> Sequence[str]:
        return [*self._java, "kafka.Kafka", str(self._file)]

    def probe(self) -> Callable[[], bool]:
        """Return a function that succeeds when the broker lists itself, which it does only after its recovery."""
        client = AdminClient({"bootstrap.servers": self.brokers, "log_level": 0, "reconnect.backoff.max.ms": 100})

        def answers() -> bool:
            with contextlib.suppress(KafkaException):
                metadata = client.list_topics(timeout=_ANSWER_SECONDS)
                return str(metadata.cluster_id) == self.cluster and _NODE in metadata.brokers
            return False

        return answers

    def check_identity(self) -> None:
        """Do nothing: the probe has already compared the cluster's id, which no other broker has."""


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if found is None:
        raise ServerError("The command java was not found.", "Install a JRE of Java 17 or newer.")
    return found


def fetch_jars() -> list[Path]:
    """Return the jars of Kafka and its dependencies, fetched unless they exist.

    Spark's resolver leaves out jars that Spark includes. For logging, Spark's jars are used, because their versions
    match.

    :raises JarsMissing: if no Maven repository can be reached.
    """
    # Each version has its own folder, because jars of different versions must not mix.
    jars = fetch(PACKAGE, HOME / f"kafka-{VERSION}")
    fetched = [jar for jar in jars if not any(name in jar.name for name in _LOGGING)]
    return [*fetched, *(jar for name in _OF_SPARK for jar in _SPARK_JARS.glob(f"{name}-[0-9]*.jar"))]


def _class_path(directory: Path, account: Account) -> str:
    """Return the class path; jars that the broker's user cannot read are copied into its directory."""
    jars = fetch_jars()
    return ":".join(str(jar if account.can_enter(jar.parent) else _copy(jar, directory, account)) for jar in jars)


def _copy(jar: Path, directory: Path, account: Account) -> Path:
    copy = directory / "jars" / jar.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(jar, copy)
    account.own(copy)
    return copy
