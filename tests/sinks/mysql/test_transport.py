"""Connections to MySQL: TLS with verification, and a server that requests files of its clients."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.errors import ConfigError, UntrustedServer
from airflow_cdc_provider.engine.sinks.mysql import transport
from airflow_cdc_provider.engine.sinks.mysql.address import Address
from airflow_cdc_provider.engine.sinks.mysql.bulk_load import Field, Loader
from airflow_cdc_provider.engine.sinks.mysql.session import Session, session
from airflow_cdc_provider.engine.sinks.mysql.types import WORDS
from local_servers.mariadb import MariadbServer
from tests.support.certificates import Authority

SECRET = "a pipeline file with its password"
_SSL = 0x0800
_CAPABILITIES = 0x000F_A28D | 0x0080  # protocol 4.1 with authentication plugins, transactions and LOCAL
_OK = b"\x00\x00\x00\x02\x00\x00\x00"


class RogueServer:
    """A server that accepts every login, and requests a file instead of answering a statement.

    :param asked: path of the file.
    :param moment: start of the statement that is not answered.
    """

    def __init__(self, asked: str, moment: bytes) -> None:
        self.asked = asked.encode()
        self.moment = moment
        self.heard = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection, connection.makefile("rb") as incoming, suppress(ConnectionError):
            greeting = b"\x0a8.4.0\0" + struct.pack("<I", 1) + b"12345678\0" + struct.pack("<H", _CAPABILITIES & 0xFFFF)
            greeting += struct.pack("<BHHB", 45, 2, _CAPABILITIES >> 16, 21) + bytes(10) + b"123456789012\0"
            self._send(connection, 0, greeting + b"mysql_native_password\0")
            while head := incoming.read(4):
                body = incoming.read(int.from_bytes(head[:3], "little"))
                self.heard += body
                statement = body[1:]
                if statement.startswith(self.moment):
                    self._send(connection, head[3] + 1, b"\xfb" + self.asked)
                elif statement.startswith(b"SELECT"):
                    self._answer(connection, statement)
                else:
                    self._send(connection, head[3] + 1, _OK)

    def _answer(self, connection: socket.socket, statement: bytes) -> None:
        values = {b"SELECT VERSION": [b"8.4.0"], b"SELECT @@local": [b"1", b"1048576"], b"SELECT 1": [b"1"]}
        row = next(row for start, row in values.items() if statement.startswith(start))
        column = b"\x03def" + bytes(3) + b"\x01c\x00\x0c" + struct.pack("<HIBHBH", 45, 64, 253, 0, 0, 0)
        eof = b"\xfe\x00\x00\x02\x00"
        packets = [bytes([len(row)]), *[column] * len(row), eof, b"".join(bytes([len(v)]) + v for v in row), eof]
        for number, packet in enumerate(packets, start=1):
            self._send(connection, number, packet)

    @staticmethod
    def _send(connection: socket.socket, number: int, body: bytes) -> None:
        connection.sendall(len(body).to_bytes(3, "little") + bytes([number]) + body)

    def close(self) -> bytes:
        """Stop the server, and return what it has received."""
        self._socket.close()
        self._thread.join(10)
        return self.heard


@contextmanager
def rogue(asked: str, moment: bytes) -> Iterator[tuple[RogueServer, Address]]:
    server = RogueServer(asked, moment)
    try:
        yield server, Address.parse(f"mysql://cdc:hunter2@127.0.0.1:{server.port}/?ssl_mode=disabled")
    finally:
        server.close()


@pytest.mark.parametrize("moment", [b"SET NAMES", b"SELECT VERSION", b"SET SESSION", b"SELECT 1", b"LOAD DATA"])
def test_no_file_is_sent_that_was_not_offered(tmp_path: Path, moment: bytes) -> None:
    """This holds for every statement that the server answers so, including our own load."""
    file = tmp_path / "pipeline.yaml"
    file.write_text(SECRET, encoding="utf-8")
    with rogue(str(file), moment) as (server, address):
        with pytest.raises(UntrustedServer, match=r"pipeline\.yaml.* was not offered"):
            read_and_load(address)
        assert SECRET.encode() not in server.close()


def read_and_load(address: Address) -> None:
    with session(address) as opened:
        assert list(opened.stream("SELECT 1", 10)) == [[("1",)]]
        load(opened)


def test_what_is_offered_is_sent_from_memory_and_once(mariadb: MariadbServer) -> None:
    with session(Address.parse(mariadb.dsn)) as opened:
        opened.run("CREATE DATABASE copy")
        opened.run("CREATE TABLE copy.t (c LONGTEXT)")
        assert load(opened) == 2
        assert [value for (value,) in opened.rows("SELECT c FROM copy.t ORDER BY 1")] == ["a,\n\"'\\", "é" * 100_000]


def load(opened: Session) -> int:
    batch = pa.RecordBatch.from_arrays([pa.array(["a,\n\"'\\", "é" * 100_000])], names=["c"])
    return Loader(opened).load("copy.t", [Field("c", WORDS)], [batch], "public.t")


def test_a_server_without_tls_is_refused_before_it_is_told_who_logs_in() -> None:
    with rogue("", b"nothing") as (server, address):
        insecure = Address.parse(f"mysql://cdc:hunter2@127.0.0.1:{address.port}/")
        with pytest.raises(UntrustedServer, match="offers no TLS") as refused, session(insecure):
            pass
        assert "ssl_mode=disabled" in refused.value.solution
        assert server.close() == b""


@pytest.fixture(scope="module")
def authority(server_directory: Path) -> Authority:
    made = Authority(server_directory / "mysql_authority")
    made.issue("server", "localhost")
    return made


@pytest.fixture(scope="module")
def protected(server_directory: Path, authority: Authority) -> Iterator[MariadbServer]:
    files = {"ssl-cert": authority.directory / "server.pem", "ssl-key": authority.directory / "server.key"}
    settings = {name: str(file) for name, file in files.items()}
    made = MariadbServer.create(server_directory / "mariadb_tls", settings)
    for file in (authority.directory, *files.values()):
        made.account.own(file)
    with made:
        yield made


def cipher(server: MariadbServer, host: str, options: str) -> str:
    with session(Address.parse(f"mysql://root@{host}:{server.port}/?{options}")) as opened:
        return str(opened.one("SHOW STATUS LIKE 'Ssl_cipher'")[1])


def test_an_authority_that_is_named_vouches_for_server_and_host(
    protected: MariadbServer, authority: Authority, tmp_path: Path
) -> None:
    known = f"ssl_ca={authority.directory / 'ca.pem'}"
    assert cipher(protected, "localhost", known)
    with pytest.raises(UntrustedServer, match=r"certificate of 127\.0\.0\.1:\d+ .*(mismatch|valid for)"):
        cipher(protected, "127.0.0.1", known)
    assert cipher(protected, "127.0.0.1", f"{known}&ssl_mode=VERIFY_CA")
    other = f"ssl_ca={Authority(tmp_path / 'other').directory / 'ca.pem'}"
    for options in (other, f"{other}&ssl_mode=verify_ca", "ssl_mode=verify_identity"):
        with pytest.raises(UntrustedServer, match="cannot be trusted"):
            cipher(protected, "localhost", options)


def test_tls_is_on_unless_the_file_says_otherwise(protected: MariadbServer) -> None:
    assert cipher(protected, "127.0.0.1", "")
    assert not cipher(protected, "127.0.0.1", "ssl_mode=disabled")
    with session(Address.parse(f"mysql://root@/?unix_socket={protected.directory / 's'}")) as opened:
        assert opened.one("SHOW STATUS LIKE 'Ssl_cipher'")[1] == ""


@pytest.mark.parametrize(
    "options",
    ["ssl_mode=preferred", "ssl_mode=disabled&ssl_ca=/ca.pem", "ssl_mode=required&ssl_ca=/ca.pem", "ssl_key=/k"],
)
def test_options_that_do_not_go_together(options: str) -> None:
    with pytest.raises(ValueError, match="ssl_"):
        Address.parse(f"mysql://cdc@h/?{options}")


def test_authorities_are_read_once_and_when_they_change(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes((authority.directory / "ca.pem").read_bytes())
    options = {"ssl_ca": str(file)}
    first = transport.context(options)
    assert transport.context(dict(options)) is first
    file.write_bytes((Authority(tmp_path / "next").directory / "ca.pem").read_bytes())
    assert transport.context(options) is not first
    assert transport.context({"ssl_mode": "disabled"}) is None
    with pytest.raises(ConfigError, match="ssl_ca=/absent"):
        transport.context({"ssl_ca": "/absent"})
