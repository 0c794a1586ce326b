"""Makes files and folders that only this user can read, unless their folder was made for a group.

A folder that is closed to others, but not to its group, was made so on purpose: what is made in it is as open to the
group. The permissions of what exists already are never changed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_folder(folder: Path, root: Path) -> None:
    """Make a folder, and those above it that are missing.

    :param root: the outermost folder that is ours, ``folder`` itself or above it: closed to all others if it is made
        here. Folders above it are made as open as the process makes them.
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
    """Open a file, as the ``opener`` of :func:`open`."""
    descriptor = os.open(path, flags, 0o600)
    group = _group_access(Path(path).parent) & 0o060
    found = os.fstat(descriptor)
    # Not that of a file which was there: who made it has decided.
    if group and flags & os.O_CREAT and found.st_size == 0 and found.st_uid == os.geteuid():
        os.fchmod(descriptor, 0o600 | group)
    return descriptor


def _group_access(folder: Path) -> int:
    mode = folder.stat().st_mode
    return 0 if mode & stat.S_IRWXO else mode & stat.S_IRWXG
