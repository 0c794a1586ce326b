"""What Python's collection of garbage costs the workers of Spark, and keeps alive in its JVM."""

from __future__ import annotations

import gc

_spared = False


def spare_modules() -> None:
    """Keep what the process has imported out of garbage collection, once for its life.

    Called at the end of tasks that have gone well, as workers live on after a task for the next one: Spark collects in
    full after each (``pyspark.daemon``). That visits all objects, most of which are of modules that stay, and takes
    longer than a small batch or chunk does itself. After an error the traceback, and all that its frames hold, would
    stay, too. In the driver, called before the first batch, for the sake of :func:`release_batches`.
    """
    global _spared
    if not _spared:
        gc.freeze()
        _spared = True


def release_batches() -> None:
    """Let the JVM free the batches that are done; called in the driver as the next one begins.

    What py4j has of a batch refers to its own methods (``JavaObject`` to ``JavaMember`` and back), so only a full
    collection lets go of it, and until then the JVM holds the plan of that batch with all of its messages. By itself
    Python collects in full when a quarter of its objects are new: dozens of batches later.
    """
    gc.collect()
