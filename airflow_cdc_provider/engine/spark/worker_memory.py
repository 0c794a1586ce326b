"""Reduces the time of Python's garbage collection in Spark's workers, and frees memory of the JVM in the driver."""

from __future__ import annotations

import gc

_spared = False


def spare_modules() -> None:
    """Exclude imported modules from garbage collection, once in the life of the process.

    Workers remain alive for the next task, and Spark does a full collection after each task (``pyspark.daemon``). It
    visits all objects, most of which belong to permanent modules, and takes longer than a small batch or chunk itself.
    Therefore this is called at the end of successful tasks. After an error, the traceback and all objects in its frames
    would be kept as well. The driver calls this before the first batch, so that :func:`release_batches` is fast.
    """
    global _spared
    if not _spared:
        gc.freeze()
        _spared = True


def release_batches() -> None:
    """Let the JVM free finished batches; the driver calls this when the next batch begins.

    The py4j objects of a batch have reference cycles with their methods (``JavaObject`` and ``JavaMember``), so only a
    full collection frees them. Until then the JVM keeps the plan of that batch with all its messages. Automatically,
    Python does a full collection only when a quarter of its objects are new: dozens of batches later.
    """
    gc.collect()
