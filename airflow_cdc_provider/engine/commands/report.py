"""The function with which a command reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Report = Callable[[str, dict[str, Any]], None]
"""Called with a command's name and its progress, about once a second."""


def silent(command: str, progress: dict[str, Any]) -> None:
    return None
