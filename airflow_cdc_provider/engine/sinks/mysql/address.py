"""Parses the address of a MySQL server, and connects to it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from airflow_cdc_provider.engine.core.errors import (
    ConfigError,
    UntrustedServer,
)
from airflow_cdc_provider.engine.sinks.mysql import transport

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sinks.mysql.safe_connection import WaryConnection


CONNECT_SECONDS = 10
_DEFAULT_PORT = 3306
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_OPTIONS = frozenset({"ssl_ca", "ssl_cert", "ssl_key", "ssl_mode", "unix_socket"})


@dataclass(frozen=True)
class Address:
    """The address of a server, and the login.

    :param options: options in the DSN's query: ``ssl_mode``, ``ssl_ca``, ``ssl_cert``, ``ssl_key`` (paths),
        ``unix_socket``.
    """

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, dsn: str) -> Address:
        """Parse ``mysql://user:password@host:port/``.

        :raises ValueError: saying what would be right, without repeating a possible password.
        """
        wanted = "a URI of the form mysql://user:password@host:port/, special characters escaped (%40 for @)"
        try:
            parts = urlsplit(dsn)
            port = parts.port
            options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        except ValueError:
            raise ValueError(wanted) from None
        if parts.scheme not in ("mysql", "mariadb") or parts.netloc.count("@") > 1 or port == 0:
            raise ValueError(wanted)
        if not parts.username or not (parts.hostname or "unix_socket" in options):
            raise ValueError(wanted)
        if not options.keys() <= _OPTIONS:
            raise ValueError(f"{wanted}, with parameters from {', '.join(sorted(_OPTIONS))}")
        transport.mode_of(options)
        return cls(
            unquote(parts.hostname or "localhost"),
            port or _DEFAULT_PORT,
            unquote(parts.username),
            unquote(parts.password or ""),
            options,
        )

    @property
    def place(self) -> str:
        """Return the server, without user and password."""
        return f"{self.host}:{self.port}"

    def connect(self) -> WaryConnection:
        """Open a bare connection.

        :raises UntrustedServer: when it would lack the protection described in :mod:`.transport`.
        """
        driver()
        from airflow_cdc_provider.engine.sinks.mysql.safe_connection import WaryConnection

        context = transport.context(self.options)
        connection = WaryConnection(
            tls=context is not None,
            host=self.host,
            port=self.port,
            user=self.user,
            password=self.password,
            charset="utf8mb4",
            autocommit=True,
            connect_timeout=CONNECT_SECONDS,
            defer_connect=True,
            unix_socket=self.options.get("unix_socket"),
            ssl=context,
            ssl_disabled=context is None,
        )
        try:
            connection.connect(None if "unix_socket" in self.options else self._socket())
        except driver().MySQLError as e:
            cause = getattr(e, "original_exception", None)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise UntrustedServer(
                    f"the certificate of {self.place} cannot be trusted: {cause.verify_message}",
                    "Set the authority that has signed the certificate in `sink.dsn` (`ssl_ca`), and use the host name"
                    " in the certificate; `ssl_mode=verify_ca` ignores the name.",
                ) from e
            raise
        return connection

    def _socket(self) -> socket.socket:
        """Return a socket that detects within half a minute that the server's machine or the network to it is gone."""
        made = socket.create_connection((self.host, self.port), CONNECT_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not every system has them
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return made


def driver() -> Any:
    """Return the module ``pymysql``, which only this sink needs.

    :raises ConfigError: when it is not installed.
    """
    try:
        import pymysql
    except ImportError as e:
        raise ConfigError(
            "cannot use the sink type mysql because the package PyMySQL is not installed",
            "Run `pip install 'airflow-cdc-provider[mysql]'` where the driver and the executors run.",
        ) from e
    return pymysql
