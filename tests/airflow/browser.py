"""The Chromium of these tests, which uses Airflow as people do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT = 180_000
"""Milliseconds to wait for a page; the machine may be busy."""
WIDTHS = (1440, 390)
"""The widths, of a desktop and of a phone, in which tests view a page."""
LOOKS = [(width, mode) for width in WIDTHS for mode in ("light", "dark")]
"""The widths and the color modes in which tests view a page."""


# The texts on the page CDC whose contrast with their background is below that of WCAG's level AA. Colors are painted to
# be compared, because they may be given in any color space.
_PALE = """() => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const painted = (colors) => {
        context.fillStyle = "white";
        context.fillRect(0, 0, 1, 1);
        for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = (color) => color.map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const texts = document.createTreeWalker(document.querySelector("[data-cdc]"), NodeFilter.SHOW_TEXT);
    const found = [];
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement;
        const said = texts.currentNode.textContent.trim();
        if (!said || !element.checkVisibility() || element.closest(":disabled")) continue;
        const layers = [], style = getComputedStyle(element);
        for (let e = element; e; e = e.parentElement) layers.unshift(getComputedStyle(e).backgroundColor);
        const ink = element.closest("svg") ? style.fill : style.color;
        const [text, ground] = [[...layers, ink], layers].map(painted).map(luminance);
        const contrast = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
        if (contrast < 4.5) found.push(`${said.slice(0, 40)}: ${contrast.toFixed(2)}`);
    }
    return found;
}"""


_FOCUSED = "document.activeElement.ariaLabel || document.activeElement.textContent.trim()"
_OUTLINE = "(({outlineStyle, boxShadow}) => [outlineStyle, boxShadow])(getComputedStyle(document.activeElement))"


def pale_texts(page: Any) -> list[str]:
    """Return the texts on the page CDC that are too pale, with their contrast."""
    found: list[str] = page.evaluate(_PALE)
    return found


def tab_to(page: Any, name: str) -> None:
    """Press Tab until an element with a name has the focus, and check that its focus can be seen."""
    for _ in range(120):
        page.keyboard.press("Tab")
        if page.evaluate(_FOCUSED) == name:
            assert page.evaluate(_OUTLINE) != ["none", "none"], f"nobody sees that {name} has the focus"
            return
    raise AssertionError(f"{name} cannot be reached by Tab")


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
    def look(self, path: str, width: int = 1440, mode: str = "light", height: int = 900) -> Iterator[Any]:
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
