"""What keeps others away from a Spark that runs on this machine alone: it listens on loopback, in private folders.

Tasks of ``local[…]`` run in the driver's JVM, so nobody of another machine has to reach it. A cluster's executors do,
and so may those who look at its web UI; there Spark's own configuration decides.
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
_LONG = 40  # a socket's path has at most 108 bytes; of its own name Spark makes 42


def local_address(conf: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which all of Spark listens on loopback, its web UI too, for which no configuration does.

    :param conf: which wins, if it says where the driver listens; as does the variable itself.
    """
    if _ADDRESS in os.environ or any(name in conf for name in _CHOSEN):
        return {}
    return {_ADDRESS: "127.0.0.1"}


def local_sockets() -> dict[str, str]:
    """Return configuration that lets Spark meet its Python processes at Unix sockets that only this user reaches.

    They save tens of milliseconds a batch. On a cluster, executors would need the folder too.
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
