"""Spark's Python workers, which live on after a task for the next one."""

from __future__ import annotations

import gc

_settled = False


def settle() -> None:
    """Keep what the worker has imported out of garbage collection; called at the end of its tasks.

    Spark collects in full after each task (``pyspark.daemon``). That visits all objects, most of which are of modules
    that stay, and takes longer than a small batch or chunk does itself.
    """
    global _settled
    if not _settled:
        gc.freeze()
        _settled = True
