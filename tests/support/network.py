"""A network whose packets can be dropped: a network namespace behind a pair of virtual interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

_CLONE_NEWNET = 0x40000000
# Networks of the block for benchmarks, which is not routed. Concurrent test processes have nearby ids.
_NETWORKS_OF_A_PROCESS = 64
_networks = list(ipaddress.ip_network("198.18.0.0/15").subnets(new_prefix=30))
_numbers = itertools.count()


class Network:
    """Another host behind a cable that can be unplugged: packets are lost in both directions without an error."""

    def __init__(self) -> None:
        number = next(_numbers)
        self._name = f"cdc{os.getpid()}n{number}"
        network = _networks[(os.getpid() * _NETWORKS_OF_A_PROCESS + number) % len(_networks)]
        ours, theirs = (str(host) for host in network.hosts())
        self._near, self._far = (f"c{os.getpid()}{end}{number}" for end in "ab")
        self.host = theirs
        if os.geteuid() or shutil.which("ip") is None:
            pytest.skip("only root can make network namespaces, and with the command ip")
        try:
            _ip(f"netns add {self._name}")
            _ip(f"link add {self._near} type veth peer name {self._far} netns {self._name}")
            _ip(f"address add {ours}/30 dev {self._near}")
            _ip(f"link set {self._near} up")
            self._there(f"address add {theirs}/30 dev {self._far}")
            self._there(f"link set {self._far} up")
            (address,) = self._there(f"-br link show {self._far}").split()[2:3]
            # Otherwise an unanswered request for the address would be reported as an error, unlike in a remote network.
            _ip(f"neighbour replace {theirs} lladdr {address} dev {self._near} nud permanent")
        except subprocess.CalledProcessError as e:
            self.close()
            pytest.skip(f"no network namespace can be made here: {e.stderr.strip()}")

    def listener(self) -> socket.socket:
        """Return a socket that listens there; the sockets that it accepts are there, too."""

        def listen() -> socket.socket:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{self._name}", "rb") as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.create_server((self.host, 0))

        with ThreadPoolExecutor(1) as there:  # a namespace belongs to a thread
            return there.submit(listen).result()

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """Drop all packets."""
        self._there(f"link set {self._far} down")
        try:
            yield
        finally:
            self._there(f"link set {self._far} up")

    def close(self) -> None:
        """Remove the namespace and the interfaces."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip(f"netns delete {self._name}")
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip(f"link delete {self._near}")

    def _there(self, arguments: str) -> str:
        return _ip(f"-netns {self._name} {arguments}")


def _ip(arguments: str) -> str:
    command = ["ip", *arguments.split()]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
