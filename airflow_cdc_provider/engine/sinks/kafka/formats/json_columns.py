"""Builds JSON as arrays of texts, column by column.

Strings are escaped like those of Jackson, which Kafka Connect uses for messages, because keys are compared by their
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

TEXT = pa.large_string()
NULL = "null"

_FIRST_PLAIN, _FIRST_BEYOND = 0x20, 0xF0
"""Bytes of UTF-8: the first character that is not a control, and the first byte of characters with two
units in UTF-16.
"""

_RARE = r"[\x00-\x1f\x{10000}-\x{10ffff}]"
_BEYOND = re.compile("[\U00010000-\U0010ffff]")
_SPELLED = str.maketrans(
    {n: f"\\u{n:04X}" for n in range(0x20)}
    | {ord(char): f"\\{letter}" for char, letter in zip('\b\t\n\f\r"\\', 'btnfr"\\', strict=True)}
)


def quoted(texts: pa.Array) -> pa.Array:
    """Return texts as JSON strings; null stays null."""
    texts = texts.cast(TEXT)
    if _is_plain(texts):
        return joined('"', texts, '"')
    rare = pc.fill_null(pc.match_substring_regex(texts, _RARE), False)
    escaped = texts
    for special in ("\\", '"'):
        escaped = pc.replace_substring(escaped, special, f"\\{special}")
    strings = joined('"', escaped, '"')
    if not pc.any(rare).as_py():
        return strings
    spelled = [string(text) for text in texts.filter(rare).to_pylist()]
    return pc.replace_with_mask(strings, rare, pa.array(spelled, TEXT))


def _is_plain(texts: pa.Array) -> bool:
    """Return whether no text has a character to be escaped in JSON; the bytes of all texts are checked at once."""
    _, offsets, data = texts.buffers()
    if not len(texts) or data is None or not data.size:
        return True
    edges = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    octets = np.frombuffer(data, np.uint8)[edges[0] : edges[-1]]
    return not octets.size or bool(
        octets.min() >= _FIRST_PLAIN
        and octets.max() < _FIRST_BEYOND
        and not (octets == ord('"')).any()
        and not (octets == ord("\\")).any()
    )


def string(text: str) -> str:
    """Return a text as a JSON string."""
    return f'"{_BEYOND.sub(_surrogates, text.translate(_SPELLED))}"'


def _surrogates(match: re.Match[str]) -> str:
    pair = match[0].encode("utf-16-be").hex().upper()
    return f"\\u{pair[:4]}\\u{pair[4:]}"


def objects(members: Mapping[str, pa.Array | str], further: Sequence[pa.Array] = ()) -> pa.Array:
    """Return JSON objects, one per row.

    :param members: JSON texts by name; null if the member is null.
    :param further: more members as texts that begin with a comma, or empty texts.
    """
    parts: list[pa.Array | str] = []
    for n, (name, values) in enumerate(members.items()):
        parts.append(f"{',' if n else '{'}{string(name)}:")
        parts.append(values if isinstance(values, str) else pc.fill_null(values.cast(TEXT), NULL))
    return joined(*parts, *further, "}")


def optional(name: str, values: pa.Array) -> pa.Array:
    """Return a member that is omitted if it is null, for the end of :func:`objects`."""
    member = joined(f",{string(name)}:", values.cast(TEXT))
    return pc.fill_null(member, "")


def joined(*parts: pa.Array | str) -> pa.Array:
    """Return the concatenation of texts; null if one of them is null."""
    texts: list[pa.Array | pa.Scalar] = []
    for constant, run in groupby(parts, lambda part: isinstance(part, str)):  # each part is a step for every row
        side = list(run)
        texts += [pa.scalar("".join(side), TEXT)] if constant else side
    return pc.binary_join_element_wise(*texts, pa.scalar("", TEXT))


def each_by_text(texts: pa.Array, spell: Callable[[str], str | None]) -> pa.Array:
    """Return the mapped texts, calling ``spell`` once per distinct text; null stays null."""
    encoded = texts.dictionary_encode()
    return pa.array([spell(text) for text in encoded.dictionary.to_pylist()], TEXT).take(encoded.indices)
