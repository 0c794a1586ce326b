"""The text of one-dimensional ``text[]`` values, as Postgres's ``array_out`` writes it and ``array_in`` reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

_NEEDS_QUOTES = r'(?i:^null$)|^$|[{}",\\ \t\n\r\x0b\x0c]'
_ELEMENT = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}]+)', re.DOTALL)


def array_texts(columns: Sequence[pa.Array]) -> pa.Array:
    """Return for each row the text of the array of the values of all columns.

    :param columns: arrays of strings or of large strings, at least one.
    """
    start, between, end, nothing = (pa.scalar(text, columns[0].type) for text in ("{", ",", "}", ""))
    elements = pc.binary_join_element_wise(*map(_elements, columns), between)
    return pc.binary_join_element_wise(start, elements, end, nothing)


def _elements(column: pa.Array) -> pa.Array:
    quote, nothing = (pa.scalar(text, column.type) for text in ('"', ""))
    escaped = pc.replace_substring_regex(column, r'(["\\])', r"\\\1")
    quoted = pc.binary_join_element_wise(quote, escaped, quote, nothing)
    return pc.fill_null(pc.if_else(pc.match_substring_regex(column, _NEEDS_QUOTES), quoted, column), "NULL")


def array_text(values: pa.ChunkedArray) -> bytes:
    """Return the text of the array of a column's values, as bytes because data from a server need not be UTF-8."""
    texts = values.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    if None not in texts:
        quoted = b'","'.join(texts)
        # There are no quotes but those between the values. This is true of nearly all columns, and ten times as fast.
        if texts and b"\\" not in quoted and quoted.count(b'"') == 2 * (len(texts) - 1):
            return b'{"' + quoted + b'"}'
    return b"{" + b",".join(b"NULL" if text is None else _quoted(text) for text in texts) + b"}"


def _quoted(text: bytes) -> bytes:
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def array_elements(text: str) -> tuple[str, ...]:
    """Return the elements of an array's text; the array must have no NULL."""
    return tuple(
        re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL) if match[2] is None else match[2]
        for match in _ELEMENT.finditer(text)
    )
