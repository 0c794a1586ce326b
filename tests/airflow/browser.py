"""The Chromium of these tests, as people who look at the Airflow use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT = 60_000
"""Milliseconds that a page is waited for; the machine may be busy."""
LOOKS = [(width, mode) for width in (1280, 390) for mode in ("light", "dark")]
"""As which widths, of a desk and of a phone, and in which colour modes people see a page."""


class Browser:
    """One Chromium for all tests; what its pages complain of is kept."""

    def __init__(self, browser: Any, base_url: str) -> None:
        self._base_url = base_url
        self._contexts = {mode: browser.new_context() for mode in ("light", "dark")}
        for mode, context in self._contexts.items():
            context.set_default_timeout(TIMEOUT)
            context.add_init_script(f"localStorage.setItem('theme', '{mode}')")
        self.complaints: list[str] = []

    def forgive(self, words: str) -> None:
        """Take for granted that a page has complained with these words."""
        left = [complaint for complaint in self.complaints if words not in complaint]
        assert len(left) < len(self.complaints)
        self.complaints = left

    @contextmanager
    def look(self, path: str, width: int = 1280, mode: str = "light", height: int = 900) -> Iterator[Any]:
        """A page of Airflow, at a width and in a colour mode."""
        page = self._contexts[mode].new_page()
        page.set_viewport_size({"width": width, "height": height})
        page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: self.complaints.append(str(e)))
        page.goto(f"{self._base_url}/{path}")
        try:
            yield page
        finally:
            page.close()
