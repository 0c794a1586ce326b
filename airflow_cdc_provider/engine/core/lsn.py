"""Log sequence numbers: positions in Postgres's write-ahead log.

Inside the engine an LSN is a plain ``int`` (bytes since the start of the log),
which NumPy, Arrow and comparisons understand. At every border (JSON, SQL, logs)
it is the text ``X/Y`` of Postgres, since JavaScript rounds integers above 2^53.
"""

from __future__ import annotations

import re

_FORMAT = re.compile(r"^([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})$")


def parse_lsn(text: str) -> int:
    """Return the LSN written as ``X/Y`` in hexadecimal.

    :raises ValueError: when ``text`` is not of that form.
    """
    match = _FORMAT.match(text)
    if match is None:
        raise ValueError(f"not an LSN: {text!r}; expected the form 16/B374D848")
    return (int(match[1], 16) << 32) | int(match[2], 16)


def format_lsn(lsn: int) -> str:
    """Return ``lsn`` as Postgres writes it, for example ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
