"""Spark's Python workers, which live on after a task for the next one."""

from __future__ import annotations

import gc

_spared = False


def spare_modules() -> None:
    """Keep what the worker has imported out of garbage collection; called at the end of tasks that have gone well.

    Spark collects in full after each task (``pyspark.daemon``). That visits all objects, most of which are of modules
    that stay, and takes longer than a small batch or chunk does itself. After an error the traceback, and all that its
    frames hold, would stay, too.
    """
    global _spared
    if not _spared:
        gc.freeze()
        _spared = True
