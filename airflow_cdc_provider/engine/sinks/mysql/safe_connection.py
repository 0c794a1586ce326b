"""A connection of PyMySQL that gives a server nothing but what was offered to it.

A server may answer any statement by asking for a file of the client, and PyMySQL then sends whatever file it names.
Here nothing is read from the file system: a load offers bytes under a name, and only for that name, and only then, they
are sent.
"""

from __future__ import annotations

from typing import Any

from pymysql import connections
from pymysql.constants import CLIENT

from airflow_cdc_provider.engine.core.errors import UntrustedServer

_PACKET_BYTES = 64 << 10

_driver: Any = connections  # most of what is needed here is not in its type stubs


class WaryConnection(_driver.Connection):  # type: ignore[misc]
    """A connection, of which :attr:`offered` is what the next statement may load: a name and bytes.

    The driver's own ``local_infile`` stays off, so that whatever does not pass here is refused by it.
    """

    offered: tuple[str, memoryview, int] | None = None

    def __init__(self, *, tls: bool, **arguments: Any) -> None:
        self._tls = tls
        super().__init__(**arguments, client_flag=CLIENT.LOCAL_FILES, local_infile=False)

    def _request_authentication(self) -> None:
        # Before the user's name and password leave; the driver would go on without TLS.
        if self._tls and not self.server_capabilities & CLIENT.SSL:
            raise UntrustedServer(
                f"the server {self.host}:{self.port} offers no TLS",
                "Let the server have a certificate; or, if the network between is trusted, append `?ssl_mode=disabled`"
                " to `sink.dsn` (of an Airflow connection, the extra `ssl_mode`).",
            )
        super()._request_authentication()

    def _process_auth(self, plugin_name: bytes, *rest: Any) -> Any:
        if not self._secure and plugin_name in (b"mysql_clear_password", b"dialog"):
            raise UntrustedServer(
                f"the server {self.host}:{self.port} asks for the password in clear text, without TLS",
                "Nothing was sent. Take `ssl_mode=disabled` out of `sink.dsn`, or use another authentication.",
            )
        return super()._process_auth(plugin_name, *rest)

    def _read_query_result(self, unbuffered: bool = False) -> int:
        """As the driver does, with results that know what was offered."""
        self._result = None
        result = _Result(self)
        if unbuffered:
            try:
                result.init_unbuffered_query()
            except BaseException:
                result.unbuffered_active = False
                result.connection = None
                raise
        else:
            result.read()
        self._result = result
        if result.server_status is not None:
            self.server_status = result.server_status
        return int(result.affected_rows)


class _Result(_driver.MySQLResult):  # type: ignore[misc]
    def _read_load_local_packet(self, first_packet: Any) -> None:
        connection = self.connection
        asked = bytes(_driver.LoadLocalPacketWrapper(first_packet).filename).decode(errors="replace")
        if connection.offered is None or asked != connection.offered[0]:
            place = f"{connection.host}:{connection.port}"
            connection._force_close()
            raise UntrustedServer(
                f"the server {place} has asked for the file {asked!r} of this machine, which was not offered to it",
                "Nothing was sent. Look whether that server, or what stands between, is what it should be, and change"
                " the password; give `sink.dsn` an `ssl_ca`, so that no other server can answer in its place.",
            )
        _, data, packet = connection.offered
        connection.offered = None
        size = min(_PACKET_BYTES, packet)
        for start in range(0, len(data), size):
            connection.write_packet(bytes(data[start : start + size]))
        connection.write_packet(b"")
        self._read_ok_packet(connection._read_packet())
