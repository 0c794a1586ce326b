"""Positions in the log of a source, such as the log sequence numbers (LSNs) of Postgres's write-ahead log.

Inside the engine, positions are plain integers that NumPy, Arrow and comparisons understand; only their type
distinguishes them from other numbers. In JSON, SQL and logs, they are texts ``X/Y`` as Postgres writes its LSNs,
because JavaScript rounds integers above 2^53.
"""

from __future__ import annotations

import re
from typing import NewType, TypeAlias

LogPosition = NewType("LogPosition", int)
"""A position up to which the log of a source has been read, as commit records store it.

Positions of one source are ordered. Only the source knows what lies between two of them.
"""

LOG_START = LogPosition(0)
"""The position before everything in a log."""
LOG_END = LogPosition((1 << 63) - 1)
"""The position after everything in a log."""

Lsn: TypeAlias = LogPosition
"""A position in Postgres's write-ahead log: bytes since its start."""

_FORMAT = re.compile(r"^([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})$")


def parse_lsn(text: str) -> Lsn:
    """Return the LSN written as ``X/Y`` in hexadecimal.

    :raises ValueError: if ``text`` does not have that form.
    """
    match = _FORMAT.match(text)
    if match is None:
        raise ValueError(f"not an LSN: {text!r}; expected the form 16/B374D848")
    return Lsn((int(match[1], 16) << 32) | int(match[2], 16))


def format_lsn(lsn: LogPosition) -> str:
    """Format a position as Postgres writes LSNs, for example ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
