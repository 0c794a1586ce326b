"""The Python that Spark starts beside its driver: this one, with the modules of PySpark that it has compiled.

Spark puts a zip of PySpark before the installed one. Modules of a zip are never kept compiled, so that each process
compiles anew what it imports, for half a second of CPU, and a stream starts seven. The same modules lie beside the zip.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "python.sh"
VARIABLE = "AIRFLOW_CDC_PYTHON"
"""What tells the script which Python to start."""
_ZIP_VARIABLE = "AIRFLOW_CDC_SPARK_ZIP"


def python_for_spark() -> dict[str, str]:
    """What has to be in Spark's environment so that it starts this Python, without the zip of the installed PySpark.

    The zip of any other Spark stays on the path.

    :returns: ``PYSPARK_PYTHON`` and what that needs. It is this Python itself where the script that leaves out the zip
        cannot be executed, or where PySpark is not among the libraries that every process of this Python finds.
    """
    package = importlib.util.find_spec("pyspark")
    if package is not None and package.origin is not None and os.access(SCRIPT, os.X_OK):
        folder = Path(package.origin).parent
        if folder.parent == Path(sysconfig.get_path("purelib")):
            archive = folder / "python" / "lib" / "pyspark.zip"
            # In this order: who copies the environment in between must not find the script without what it needs.
            return {VARIABLE: sys.executable, _ZIP_VARIABLE: str(archive), "PYSPARK_PYTHON": str(SCRIPT)}
    return {"PYSPARK_PYTHON": sys.executable}


def is_this_python(path: str) -> bool:
    """Whether ``PYSPARK_PYTHON`` leads to this Python, by the script, too; Airflow's worker has another copy of it."""
    return path == sys.executable or (Path(path).name == SCRIPT.name and os.environ.get(VARIABLE) == sys.executable)
