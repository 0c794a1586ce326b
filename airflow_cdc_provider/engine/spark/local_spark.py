"""Protects a Spark that runs only on this machine: it listens on loopback and uses private folders.

Tasks of ``local[…]`` run in the driver's JVM, so other machines do not need access to it. The executors of a cluster
and users of its web UI do need access; there, Spark's own configuration applies.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache

_ADDRESS = "SPARK_LOCAL_IP"
_CHOSEN = ("spark.driver.bindAddress", "spark.driver.host")
_LONG = 40  # a socket's path has at most 108 bytes; Spark uses 42 for its own name


def local_address(conf: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that makes Spark listen on loopback only.

    It also applies to the web UI, for which there is no configuration.

    :param conf: Spark's configuration; if it sets the driver's address, it takes precedence, as does the variable if it
        is already set.
    """
    if _ADDRESS in os.environ or any(name in conf for name in _CHOSEN):
        return {}
    return {_ADDRESS: "127.0.0.1"}


def local_sockets() -> dict[str, str]:
    """Return the configuration that connects Spark to its Python processes by Unix sockets of this user.

    They save tens of milliseconds per batch. On a cluster, executors would need the folder too.
    """
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": _folder(),
    }


@cache
def _folder() -> str:
    place = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="airflow-cdc-", dir=place if len(place) < _LONG else "/tmp")  # with mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
