"""Creates files and folders that only this user can read, unless their folder was created for a group.

If a folder is closed to others but open to its group, this was done on purpose: new files and folders in it are equally
open to the group. The permissions of existing files and folders are never changed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_folder(folder: Path, root: Path) -> None:
    """Create a folder and its missing parents.

    :param root: the outermost folder that belongs to the pipeline, ``folder`` itself or a parent of it. If it is
        created, it is closed to all others. Folders above it get the default permissions of the process.
    """
    if folder.is_dir():
        return
    if folder == root:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return
    make_folder(folder.parent, root)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # another process was first
        return
    if group := _group_access(folder.parent):
        folder.chmod(0o700 | group | folder.stat().st_mode & stat.S_ISGID)


def open_file(path: str, flags: int) -> int:
    """Open a file with private permissions; an ``opener`` for :func:`open`."""
    descriptor = os.open(path, flags, 0o600)
    group = _group_access(Path(path).parent) & 0o060
    found = os.fstat(descriptor)
    # Permissions of an existing file are kept, because its creator chose them.
    if group and flags & os.O_CREAT and found.st_size == 0 and found.st_uid == os.geteuid():
        os.fchmod(descriptor, 0o600 | group)
    return descriptor


def _group_access(folder: Path) -> int:
    mode = folder.stat().st_mode
    return 0 if mode & stat.S_IRWXO else mode & stat.S_IRWXG
