"""The prose of the project is plain American English: documentation, docstrings, comments, and texts for users."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("airflow_cdc_provider", "benchmarks", "dags", "demo", "docs", "local_servers", "tests")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
SUFFIXES = (".py", ".md", ".js", ".html")

STILTED = (
    "is told|are told|to be had|lest|for want of|in vain|be they|of before|so long a|for who|as far as|has it that|"
    "by itself|anew|gone back|besides?|stands in|holds of|says what helps|for ever|nobody|somebody|whoever|of its own|"
    "at hand|makes out|is taken for|goes by|what stands there|all the same|nor is"
)
BRITISH = (
    r"\w*(?:behaviour|colour|favour|neighbour)\w*|"
    r"\w*(?:initial|local|material|maxim|minim|normal|optim|organ|recogn|serial|summar|synchron|vector)is(?:e|ing|ation)\w*|"
    "analys(?:e|ed|ing)|cancell(?:ed|ing)|catalogues?|cent(?:re|red)|labell(?:ed|ing)|learnt|licences?|whilst"
)
_WORDS = re.compile(rf"\b(?:{STILTED}|{BRITISH})\b".replace(" ", r"\s+"), re.IGNORECASE)
_COMMENT = re.compile(r"(?:^\s*|  )# (.*)")
_CODE = re.compile(r"```.*?```|``[^`]+``|`[^`\n]+`", re.DOTALL)

Prose = Iterable[tuple[int, str]]
"""Pieces of text, each with the line on which it starts."""


def find(prose: Prose) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each hit."""
    for start, text in prose:
        for hit in _WORDS.finditer(text):
            yield start + text.count("\n", 0, hit.start()), " ".join(hit[0].split())


def without_code(text: str) -> str:
    """Return a text in which a backtick and the line breaks replace each piece of code."""
    return _CODE.sub(lambda code: "`" + "\n" * code[0].count("\n"), text)


def python_prose(source: str, *, literals: bool = True) -> Prose:
    """Yield each block of comments, and each string of more than one word.

    :param literals: whether to include strings that are not docstrings.
    """
    hits = ((number, _COMMENT.search(line)) for number, line in enumerate(source.splitlines(), 1))
    comments = {number: hit[1] for number, hit in hits if hit}
    for number in comments:
        if number - 1 not in comments:
            block = itertools.takewhile(comments.__contains__, itertools.count(number))
            yield number, without_code("\n".join(comments[each] for each in block))
    nodes = ast.walk(ast.parse(source))
    for node in nodes if literals else (each.value for each in nodes if isinstance(each, ast.Expr)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, without_code(node.value)


def prose_of(path: Path) -> Prose:
    """Return the prose of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        # Strings in tests are data, or texts that are checked where they are written.
        return python_prose(text, literals=ROOT / "tests" not in path.parents)
    return [(1, without_code(text) if path.suffix == ".md" else text)]


@pytest.mark.parametrize("name", [*FOLDERS, *PAGES])
def test_prose_is_plain_american_english(name: str) -> None:
    paths = [path for path in [ROOT / name, *sorted((ROOT / name).rglob("*"))] if path.suffix in SUFFIXES]
    assert paths
    found = [f"{path.relative_to(ROOT)}:{line}: {words}" for path in paths for line, words in find(prose_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Readers are\ntold."""\n', [(1, "are told")]),
        ("x = 1\n# Read\n# Anew, and\n# by\n# itself.\n", [(3, "Anew"), (4, "by itself")]),
        (
            'fail(f"of {x} before", "the row" " of before", f"{x} for want of {y}")',
            [(1, "of before"), (1, "for want of")],
        ),
        ('"""The colours of ``anew`` are `lest`; stands ``x`` in."""', [(1, "colours")]),
        ('CASE, TEXT = "beside", "Serialised, neighbouring"', [(1, "Serialised"), (1, "neighbouring")]),
        ('"""The behavior is forever canceled; a newer lesson, otherwise precise."""', []),
    ],
)
def test_the_check_finds_words_and_turns(source: str, found: list[tuple[int, str]]) -> None:
    assert list(find(python_prose(source))) == found
