"""Text tables and sizes for people."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Format rows under a header; every column except the first is aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()

    return "\n".join([line(header), "  ".join("─" * width for width in widths), *map(line, body)])


def human_bytes(count: int | None) -> str:
    """Format a number of bytes in a readable unit, for example ``3.4 MiB``."""
    if count is None:
        return "unknown"
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
