"""Names of files that are not whole yet, by which nobody takes them for files."""

from __future__ import annotations

import uuid

TEMPORARY = ".tmp-"


def beside(path: str) -> str:
    """Where to write what is to become a file, so that neither readers nor :meth:`Place.names` take it for one."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{TEMPORARY}{name}-{uuid.uuid4().hex}"
