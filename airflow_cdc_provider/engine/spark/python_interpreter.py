"""Selects the Python that Spark starts on the driver's machine: this interpreter, with compiled modules of PySpark.

Spark puts a zip of PySpark on the path before the installed package. Compiled modules of a zip are never stored, so
each process compiles its imports again. This takes half a second of CPU, and a stream starts seven processes. The same
modules are installed next to the zip.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "python.sh"
VARIABLE = "AIRFLOW_CDC_PYTHON"
"""Environment variable with the Python that the script starts."""
_ZIP_VARIABLE = "AIRFLOW_CDC_SPARK_ZIP"


def python_for_spark() -> dict[str, str]:
    """Return the environment with which Spark starts this Python without the zip of the installed PySpark.

    The zip of any other Spark remains on the path.

    :returns: ``PYSPARK_PYTHON`` and further variables that it needs. It is this Python itself if the script that
        removes the zip cannot be executed, or if PySpark is not in the library folder of this Python.
    """
    package = importlib.util.find_spec("pyspark")
    if package is not None and package.origin is not None and os.access(SCRIPT, os.X_OK):
        folder = Path(package.origin).parent
        if folder.parent == Path(sysconfig.get_path("purelib")):
            archive = folder / "python" / "lib" / "pyspark.zip"
            # In this order, a concurrent copy of the environment never has the script without its variables.
            return {VARIABLE: sys.executable, _ZIP_VARIABLE: str(archive), "PYSPARK_PYTHON": str(SCRIPT)}
    return {"PYSPARK_PYTHON": sys.executable}


def is_this_python(path: str) -> bool:
    """Return whether ``PYSPARK_PYTHON`` starts this Python, directly or by any copy of the script.

    Airflow's worker has another copy.
    """
    return path == sys.executable or (Path(path).name == SCRIPT.name and os.environ.get(VARIABLE) == sys.executable)
