"""A PyMySQL connection that sends a server only data that was offered to it.

A server may answer any statement by asking for a file of the client, and PyMySQL would send any file that it names.
This connection reads nothing from the file system. A load offers bytes under a name, and they are sent only for that
name, while the load runs.
"""

from __future__ import annotations

from typing import Any

from pymysql import connections
from pymysql.constants import CLIENT

from airflow_cdc_provider.engine.core.errors import UntrustedServer

_PACKET_BYTES = 64 << 10

_driver: Any = connections  # the type stubs lack most of the names used here


class WaryConnection(_driver.Connection):  # type: ignore[misc]
    """A connection whose next statement may load :attr:`offered`: a name and bytes.

    The driver's own ``local_infile`` stays off, so that the driver refuses everything else.
    """

    offered: tuple[str, memoryview, int] | None = None

    def __init__(self, *, tls: bool, **arguments: Any) -> None:
        self._tls = tls
        super().__init__(**arguments, client_flag=CLIENT.LOCAL_FILES, local_infile=False)

    def _request_authentication(self) -> None:
        # Checked before user name and password are sent; the driver would go on without TLS.
        if self._tls and not self.server_capabilities & CLIENT.SSL:
            raise UntrustedServer(
                f"the server {self.host}:{self.port} offers no TLS",
                "Install a certificate on the server. Or, if the network between is trusted, append"
                " `?ssl_mode=disabled` to `sink.dsn` (in an Airflow connection, set the extra `ssl_mode`).",
            )
        super()._request_authentication()

    def _process_auth(self, plugin_name: bytes, *rest: Any) -> Any:
        if not self._secure and plugin_name in (b"mysql_clear_password", b"dialog"):
            raise UntrustedServer(
                f"the server {self.host}:{self.port} asks for the password in clear text, without TLS",
                "Nothing was sent. Remove `ssl_mode=disabled` from `sink.dsn`, or use another authentication.",
            )
        return super()._process_auth(plugin_name, *rest)

    def _read_query_result(self, unbuffered: bool = False) -> int:
        """Read a result like the driver, but with access to the offered data."""
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
                f"the server {place} asked for the file {asked!r} of this machine, which was not offered to it",
                "Nothing was sent. Check the identity of that server and of any proxy in between, and change the"
                " password. Add an `ssl_ca` to `sink.dsn`, so that no other server can answer in its place.",
            )
        _, data, packet = connection.offered
        connection.offered = None
        size = min(_PACKET_BYTES, packet)
        for start in range(0, len(data), size):
            connection.write_packet(bytes(data[start : start + size]))
        connection.write_packet(b"")
        self._read_ok_packet(connection._read_packet())
