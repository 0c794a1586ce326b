"""Names of unfinished files, which readers ignore."""

from __future__ import annotations

import uuid

TEMPORARY = ".tmp-"


def temporary_name(path: str) -> str:
    """Return a temporary name for a file, which readers and :meth:`.Storage.names` ignore."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{TEMPORARY}{name}-{uuid.uuid4().hex}"
