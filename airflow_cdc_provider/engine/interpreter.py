"""The Python that Spark starts beside its driver: this one, with the modules of PySpark that it has compiled.

Spark puts a zip of PySpark before the installed one. Modules of a zip are never kept compiled, so that each process
compiles anew what it imports, for half a second of CPU, and a stream starts seven. The same modules lie beside the zip.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

_SCRIPT = """\
#!/bin/sh
zip={zip}
path=:$PYTHONPATH:
while [ "$path" != "${{path%%:"$zip":*}}" ]; do path=${{path%%:"$zip":*}}:${{path#*:"$zip":}}; done
path=${{path#:}}
export PYTHONPATH="${{path%:}}"
exec {python} "$@"
"""


def write_interpreter(directory: Path) -> str:
    """Write a script that starts this Python without the zip of the installed PySpark.

    A zip of any other Spark stays on the path.

    :param directory: where to; it must stay as long as Spark starts processes.
    :returns: what ``PYSPARK_PYTHON`` should be: the script, or this Python if scripts cannot be executed there or there
        is no such zip.
    """
    text = _script()
    if text is None:
        return sys.executable
    script = directory / "python"
    script.write_text(text, encoding="utf-8")
    script.chmod(0o700)
    return str(script) if os.access(script, os.X_OK) else sys.executable


def is_this_python(path: str) -> bool:
    """Whether a path leads to this Python, be it by a script that this process or its parent has written."""
    try:
        return path == sys.executable or Path(path).read_text(encoding="utf-8") == _script()
    except (OSError, UnicodeDecodeError):
        return False


def _script() -> str | None:
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        return None
    archive = Path(package.origin).parent / "python" / "lib" / "pyspark.zip"
    if not archive.is_file():
        return None
    return _SCRIPT.format(zip=shlex.quote(str(archive)), python=shlex.quote(sys.executable))
