"""How long tests wait."""

from __future__ import annotations

SECONDS = 120.0
"""How long a command or a state is waited for; far beyond what it takes, since the machine may be busy."""
