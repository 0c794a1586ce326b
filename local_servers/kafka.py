"""A temporary Kafka broker in a directory of its own, beside the servers in :mod:`.servers`.

It is Apache Kafka's own, from the jars of Maven Central, as broker and controller in one process without anything
beside it (KRaft). It listens on ports of loopback that were free, and everything that it writes is in its directory.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import pyspark
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.jars import HOME, fetch
from local_servers.postgres import (
    LOG_TAIL_LINES,
    START_SECONDS,
    STOP_SECONDS,
    Account,
    ServerError,
    end_guard,
    find_free_port,
    start_guard,
)

# 4.3.1 may leave a transaction open for ever that it has committed when it is killed right then (KAFKA-20734).
VERSION = "4.0.2"
PACKAGE = f"org.apache.kafka:kafka_2.13:{VERSION}"

# One broker holds all replicas, and with few partitions in the topics of its own it starts sooner.
SETTINGS: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    # A broker that comes back from a crash is let in when the session that it had is over.
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    "group.initial.rebalance.delay.ms": "0",
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
    """A user of the listener that asks for one, who may do nothing unless he is granted it."""

    user: str
    password: str = field(repr=False)

    @property
    def settings(self) -> dict[str, str]:
        """The broker's settings that let the user in, and leave everything to those who come without a name."""
        password = re.sub(r'(["\\])', r"\\\1", self.password)
        return {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.login.plain.sasl.jaas.config": f'{_PLAIN} required user_{self.user}="{password}";',
        }


@dataclass(eq=False)
class KafkaServer:
    """One broker with its directory; made by :meth:`create`.

    :ivar port: of the listener that lets everybody do everything.
    :ivar login_port: of the listener that asks for user and password, if there is one.
    :ivar cluster: what the broker calls its cluster.
    """

    directory: Path
    port: int
    login_port: int | None
    cluster: str
    account: Account
    _command: Sequence[str] = field(repr=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _guard: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def create(
        cls, directory: Path, settings: Mapping[str, str] | None = None, login: Login | None = None
    ) -> KafkaServer:
        """Prepare a broker in ``directory``, which is new or empty; it is not started yet.

        :param settings: those of the broker, above :data:`SETTINGS`.
        :param login: a user, for whom there is a listener of its own.
        :raises JarsMissing: when Kafka cannot be fetched.
        :raises ServerError: when Java is missing, or Kafka does not run here.
        """
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ServerError(f"{directory} is not empty.", "Choose a directory that is new or empty.")
        account = Account.choose()
        account.own(directory)
        if not account.can_enter(directory):
            raise ServerError(
                f"{directory} cannot be reached by the user as whom Kafka must run.",
                "Choose a directory whose parents are open to all users, for instance directly below /tmp.",
            )
        scratch = directory / "tmp"
        scratch.mkdir()
        account.own(scratch)
        # Libraries of native code are unpacked there, and stay behind after a crash.
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
            "log.dirs": str(self.directory / "data"),
            **(login.settings if login else {}),
            **settings,
        }
        lines = [f"{name}={value}\n".replace("\\", "\\\\") for name, value in given.items()]
        # Java's encoding of such files, in which other characters are escaped.
        self._file.write_text("".join(lines), encoding="latin-1", errors="backslashreplace")
        self._file.chmod(0o600)
        self.account.own(self._file)

    def _format(self) -> None:
        # A cluster's name may begin with a hyphen.
        tool = ("kafka.tools.StorageTool", "format", f"--cluster-id={self.cluster}", f"--config={self._file}")
        done = subprocess.run(
            [*self._command, *tool],
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            **self.account.popen_arguments(),
        )
        if done.returncode != 0:
            raise ServerError(
                f"Kafka's storage tool failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}".rstrip(),
                "Correct the setting that it names; otherwise check that Java is 17 or newer and the disk has space.",
            )

    @property
    def _file(self) -> Path:
        return self.directory / "server.properties"

    @property
    def log_file(self) -> Path:
        """Where the broker's log goes."""
        return self.directory / "server.log"

    @property
    def brokers(self) -> str:
        """The address at which everybody may do everything."""
        return f"127.0.0.1:{self.port}"

    @property
    def login_brokers(self) -> str:
        """The address at which a user logs in."""
        return f"127.0.0.1:{self.login_port}"

    @property
    def running(self) -> bool:
        """Whether the broker's process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the broker and wait until it answers; a running broker is left alone."""
        if self.running:
            return
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                [*self._command, "kafka.Kafka", str(self._file)],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self.account.popen_arguments(),
            )
        self._process = process
        self._guard = start_guard(process.pid, signals=("TERM", "KILL"))
        atexit.register(self.kill)
        try:
            self._await_start(process)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop the broker; one that does not stop in time is killed."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        self.kill()

    def restart(self, mode: Literal["stop", "kill"] = "stop") -> None:
        """Stop or kill, and start on the same port and data."""
        self.stop() if mode == "stop" else self.kill()
        self.start()

    def kill(self) -> None:
        """Kill the broker, as a crash of its process would."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        end_guard(self._guard)
        self._guard = None
        self._process = None
        atexit.unregister(self.kill)

    def remove(self) -> None:
        """Kill the broker and delete its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _await_start(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the broker counts itself in, which it does when it has read what a crash has left.

        Nobody else can answer for it: clusters have names of their own.
        """
        client = AdminClient({"bootstrap.servers": self.brokers, "log_level": 0, "reconnect.backoff.max.ms": 100})

        def answers() -> bool:
            if process.poll() is not None:
                raise self._start_failure(f"exited with code {process.returncode}")
            with contextlib.suppress(KafkaException):
                metadata = client.list_topics(timeout=_ANSWER_SECONDS)
                return str(metadata.cluster_id) == self.cluster and _NODE in metadata.brokers
            return False

        if not await_condition(answers, START_SECONDS):
            raise self._start_failure(f"did not answer within {START_SECONDS:.0f} seconds")

    def _start_failure(self, what: str) -> ServerError:
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        tail = re.sub(r"(?m)^", "  ", "\n".join(lines[-LOG_TAIL_LINES:]))
        return ServerError(
            f"Kafka in {self.directory} {what}. The end of its log:\n{tail}",
            "Correct what the log names: a setting, a port that is taken, a full disk.",
        )


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if found is None:
        raise ServerError("There is no java on this machine.", "Install a JRE of Java 17 or newer.")
    return found


def fetch_jars() -> list[Path]:
    """Kafka with all that it needs, fetched unless it is there.

    Spark's resolver leaves out what Spark has, and the logging goes by Spark's libraries, which fit together.

    :raises JarsMissing: when there is no way to a Maven repository.
    """
    # Of all jars that are there none may be another version's.
    jars = fetch(PACKAGE, HOME / f"kafka-{VERSION}")
    fetched = [jar for jar in jars if not any(name in jar.name for name in _LOGGING)]
    return [*fetched, *(jar for name in _OF_SPARK for jar in _SPARK_JARS.glob(f"{name}-[0-9]*.jar"))]


def _class_path(directory: Path, account: Account) -> str:
    """The jars, of which those that the broker's user cannot read are copied into its directory."""
    jars = fetch_jars()
    return ":".join(str(jar if account.can_enter(jar.parent) else _copy(jar, directory, account)) for jar in jars)


def _copy(jar: Path, directory: Path, account: Account) -> Path:
    copy = directory / "jars" / jar.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(jar, copy)
    account.own(copy)
    return copy
