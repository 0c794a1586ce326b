"""The Chromium of these tests, which uses Airflow as people do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT = 180_000
"""Milliseconds to wait for a page; the machine may be busy."""
WIDTHS = (1280, 390)
"""The widths, of a desktop and of a phone, in which tests view a page."""
LOOKS = [(width, mode) for width in WIDTHS for mode in ("light", "dark")]
"""The widths and the color modes in which tests view a page."""


class Browser:
    """One Chromium for all tests; it records errors on the console of its pages."""

    def __init__(self, browser: Any, base_url: str) -> None:
        self._base_url = base_url
        self._contexts = {mode: browser.new_context() for mode in ("light", "dark")}
        for mode, context in self._contexts.items():
            context.set_default_timeout(TIMEOUT)
            context.add_init_script(f"localStorage.setItem('theme', '{mode}')")
        self.complaints: list[str] = []

    def forgive(self, words: str) -> None:
        """Ignore messages of a page that contain these words."""
        left = [complaint for complaint in self.complaints if words not in complaint]
        assert len(left) < len(self.complaints)
        self.complaints = left

    @contextmanager
    def look(self, path: str, width: int = 1280, mode: str = "light", height: int = 900) -> Iterator[Any]:
        """Open a page of Airflow, with a width and a color mode."""
        page = self._contexts[mode].new_page()
        page.set_viewport_size({"width": width, "height": height})
        page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: self.complaints.append(str(e)))
        page.goto(f"{self._base_url}/{path}")
        try:
            yield page
        finally:
            page.close()
