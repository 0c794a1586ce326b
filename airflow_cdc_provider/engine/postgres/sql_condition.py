"""Whether the text of a condition stays within the parentheses that it is put into.

A condition of the pipeline file or of ``resnapshot --where`` goes into our queries as it is. One that closes a
parenthesis which it has not opened would be another than it seems, ``a) OR (b`` for one, and after a semicolon the
server runs whatever stands there. So the text is cut into tokens as the server does it under the settings of our
sessions, as far as it takes to tell what is quoted. Whether it is a condition is for the server to say.
"""

from __future__ import annotations

import re

_NAME = r"[A-Za-z_\u0080-\U0010ffff]"
# A name comes with what is neither a prefix of the quote after it nor a dollar quote.
_TOKEN = re.compile(
    rf"(?P<quote>[Ee]?'|\"|\$(?:{_NAME}(?:{_NAME}|[0-9])*)?\$)|{_NAME}(?:{_NAME}|[0-9$])*|--[^\n\r]*|/\*|.", re.DOTALL
)
_REST = {
    "'": re.compile(r"(?:[^']|'')*+'"),
    '"': re.compile(r'(?:[^"]|"")*+"'),
    # Not followed by a quote on another line, which would continue it, escapes and all.
    "E'": re.compile(r"(?:[^'\\]|''|\\.)*+'(?!(?:\s|--[^\n\r]*)*+')", re.DOTALL),
}
_COMMENT = re.compile(r"/\*|\*/")


def find_trouble(text: str) -> str | None:
    """Tell why a text, followed by a line break, is more or less than what could stand in parentheses.

    :returns: ``None`` when it is not.
    """
    depth = place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        assert token is not None, "any character is a token"
        place = token.end()
        if token["quote"] or token[0] == "/*":
            end = _end(text, place, token[0])
            if end is None:
                return f"what begins with {token[0]} does not end"
            place = end
        elif token[0] in (";", "\0"):
            return "it has a semicolon" if token[0] == ";" else "it has a zero byte"
        elif token[0] in ("(", ")"):
            depth += 1 if token[0] == "(" else -1
            if depth < 0:
                return "it closes a parenthesis that it has not opened"
    return "it opens a parenthesis that it does not close" if depth else None


def _end(text: str, place: int, begin: str) -> int | None:
    """Where a quotation or a comment ends that has begun before ``place``."""
    if begin == "/*":
        return _end_of_comment(text, place)
    if begin.startswith("$"):
        found = text.find(begin, place)
        return None if found < 0 else found + len(begin)
    rest = _REST[begin.upper()].match(text, place)
    return None if rest is None else rest.end()


def _end_of_comment(text: str, place: int) -> int | None:
    depth = 1  # comments nest
    for mark in _COMMENT.finditer(text, place):
        depth += 1 if mark[0] == "/*" else -1
        if not depth:
            return mark.end()
    return None
