"""Failpoints: places in the protocol at which a test can make the process fail or stop.

``AIRFLOW_CDC_FAILPOINT=name:error|kill|pause`` arms one of them. ``error`` raises an exception, ``kill`` ends the
process as ``kill -9`` would, and ``pause`` stops it until SIGCONT. ``name:action:n`` acts the n-th time that the
process reaches the place.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

from airflow_cdc_provider.engine.core.errors import Failpoint

VARIABLE = "AIRFLOW_CDC_FAILPOINT"

_passed = Counter[str]()


def failpoint(name: str) -> None:
    """Fire if the environment arms the failpoint ``name``.

    :raises Failpoint: if it is armed with ``error``.
    """
    armed, _, rest = os.environ.get(VARIABLE, "").partition(":")
    if armed != name:
        return
    action, _, pass_ = rest.partition(":")
    _passed[name] += 1
    if pass_ and _passed[name] != int(pass_):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "pause":
        # If another thread received the signal, this one would continue for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return
    raise Failpoint(f"failpoint {name} fired", f"Unset {VARIABLE}.")
