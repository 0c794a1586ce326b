"""Failpoints: places in the protocol at which a test can break or stop the process.

``AIRFLOW_CDC_FAILPOINT=name:error|kill|pause`` arms one of them. ``error`` raises,
``kill`` ends the process as ``kill -9`` would, ``pause`` stops it until SIGCONT.
``name:action:n`` acts at the n-th time that the process passes.
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

    :raises Failpoint: when armed with ``error``.
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
        # By way of another thread of the process, this one would go on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return
    raise Failpoint(f"failpoint {name} fired", f"Unset {VARIABLE}.")
