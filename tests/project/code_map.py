"""Write the map of the code in docs/concepts.md from the folders' docstrings: ``python -m tests.project.code_map``."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts.md"
BEGIN, END = "<!-- the map: python -m tests.project.code_map -->\n", "<!-- end of the map -->\n"

ENGINE = "airflow_cdc_provider/engine"
# Each room may import only those before it.
ROOMS = (
    "core",
    "postgres",
    "kafka",
    "spark",
    "changes",
    "state",
    "comparison",
    "views",
    "sinks",
    "pipeline",
    "runs",
    "sources",
    "commands",
)
POSTGRES = f"{ENGINE}/sources/postgres"
PARTS_OF_POSTGRES = ("catalog", "reading", "provision", "wal", "stream")


def folders() -> list[str]:
    """Return the folders of the package in the order of the map, followed by the packages next to it."""
    engine = ["airflow_cdc_provider", ENGINE]
    for room in ROOMS:
        engine += [f"{ENGINE}/{room}"]
        below = sorted(path.parent for path in (ROOT / ENGINE / room).glob("*/**/__init__.py"))
        names = [str(path.relative_to(ROOT)) for path in below]
        ordered = [f"{POSTGRES}/{part}" for part in PARTS_OF_POSTGRES]
        for name in names:
            if name not in ordered:
                engine.append(name)
            if name == POSTGRES:
                engine += ordered
    shells = sorted(
        str(path.parent.relative_to(ROOT))
        for path in (ROOT / "airflow_cdc_provider").glob("*/__init__.py")
        if path.parent.name != "engine"
    )
    return [*engine, *shells, "demo", "local_servers", "benchmarks"]


def sentence(folder: str) -> str:
    """Return the first paragraph of a folder's docstring, on one line."""
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8")))
    assert text, f"{folder} has no docstring"
    return " ".join(text.partition("\n\n")[0].split())


def code_map() -> str:
    """Return the map: a line for each folder, indented by its depth."""
    lines = ["```text"]
    for folder in folders():
        depth = folder.count("/")
        name = f"{'  ' * depth}{folder.rpartition('/')[2]}/"
        lines += textwrap.wrap(sentence(folder), 118, initial_indent=f"{name:<22} ", subsequent_indent=" " * 23)
    return "\n".join([*lines, "```", ""])


def main() -> None:
    """Write the map into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{code_map()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
