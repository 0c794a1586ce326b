"""Checks that the text of a condition stays within the parentheses that it is put into.

A condition of the pipeline file or of ``resnapshot --where`` becomes part of queries unchanged. If it closes a
parenthesis that it has not opened, as in ``a) OR (b``, it changes the meaning of the query; and after a semicolon, the
server would run any statement. Therefore the text is split into tokens as the server does it under the session
settings, in enough detail to recognize quoted parts. The server itself decides whether the text is a condition.
"""

from __future__ import annotations

import re

_NAME = r"[A-Za-z_\u0080-\U0010ffff]"
# A name includes everything that is neither a prefix of the quote after it nor a dollar quote.
_TOKEN = re.compile(
    rf"(?P<quote>[Ee]?'|\"|\$(?:{_NAME}(?:{_NAME}|[0-9])*)?\$)|{_NAME}(?:{_NAME}|[0-9$])*|--[^\n\r]*|/\*|.", re.DOTALL
)
_REST = {
    "'": re.compile(r"(?:[^']|'')*+'"),
    '"': re.compile(r'(?:[^"]|"")*+"'),
    # Not followed by a quote on another line, which would continue it, escapes included.
    "E'": re.compile(r"(?:[^'\\]|''|\\.)*+'(?!(?:\s|--[^\n\r]*)*+')", re.DOTALL),
}
_COMMENT = re.compile(r"/\*|\*/")


def find_syntax_problem(text: str) -> str | None:
    """Return why a text, followed by a line break, cannot be put into parentheses.

    :returns: the reason, or ``None`` if it can.
    """
    depth = place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        assert token is not None, "any character is a token"
        place = token.end()
        if token["quote"] or token[0] == "/*":
            end = _end(text, place, token[0])
            if end is None:
                return f"the part that begins with {token[0]} does not end"
            place = end
        elif token[0] in (";", "\0"):
            return "it has a semicolon" if token[0] == ";" else "it has a zero byte"
        elif token[0] in ("(", ")"):
            depth += 1 if token[0] == "(" else -1
            if depth < 0:
                return "it closes a parenthesis that it has not opened"
    return "it opens a parenthesis that it does not close" if depth else None


def _end(text: str, place: int, begin: str) -> int | None:
    """Return the end of a quotation or comment that has begun before ``place``, or ``None`` if it does not end."""
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
