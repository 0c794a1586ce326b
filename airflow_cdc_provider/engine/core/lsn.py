"""Positions in the log of a source, and those of Postgres's write-ahead log: log sequence numbers.

Inside the engine they are plain integers, which NumPy, Arrow and comparisons
understand; their type alone tells them from other numbers. At every border
(JSON, SQL, logs) they are texts ``X/Y``, as Postgres writes its LSNs, since
JavaScript rounds integers above 2^53.
"""

from __future__ import annotations

import re
from typing import NewType, TypeAlias

LogPosition = NewType("LogPosition", int)
"""How far the log of a source has been read, as commit records have it. Those of one source are in an order; what lies
between two of them, the source alone knows."""

LOG_START = LogPosition(0)
"""Before all that is in a log."""
LOG_END = LogPosition((1 << 63) - 1)
"""Beyond all that is in a log."""

Lsn: TypeAlias = LogPosition
"""A position in Postgres's write-ahead log: bytes since its start."""

_FORMAT = re.compile(r"^([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})$")


def parse_lsn(text: str) -> Lsn:
    """Return the LSN written as ``X/Y`` in hexadecimal.

    :raises ValueError: when ``text`` is not of that form.
    """
    match = _FORMAT.match(text)
    if match is None:
        raise ValueError(f"not an LSN: {text!r}; expected the form 16/B374D848")
    return Lsn((int(match[1], 16) << 32) | int(match[2], 16))


def format_lsn(lsn: LogPosition) -> str:
    """Return a position as Postgres writes its own, for example ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
