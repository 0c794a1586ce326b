"""Timeouts of tests."""

from __future__ import annotations

SECONDS = 240.0
"""Seconds to wait for a command or a state; far longer than necessary, because the machine may be busy."""
