"""JSON as arrays of texts, built column by column."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

TEXT = pa.large_string()
NULL = "null"

_CONTROL = r"[\x00-\x1f]"


def quoted(texts: pa.Array) -> pa.Array:
    """Texts as JSON strings; null stays null."""
    texts = texts.cast(TEXT)
    control = pc.fill_null(pc.match_substring_regex(texts, _CONTROL), False)
    escaped = texts
    for special in ("\\", '"'):
        escaped = pc.replace_substring(escaped, special, f"\\{special}")
    strings = joined('"', escaped, '"')
    if not pc.any(control).as_py():
        return strings
    spelled = [json.dumps(text, ensure_ascii=False) for text in texts.filter(control).to_pylist()]
    return pc.replace_with_mask(strings, control, pa.array(spelled, TEXT))


def objects(members: Mapping[str, pa.Array | str], further: Sequence[pa.Array] = ()) -> pa.Array:
    """JSON objects, one a row.

    :param members: JSON texts by name; null where the member is null.
    :param further: more members as texts that begin with a comma, or empty ones.
    """
    parts: list[pa.Array | str] = []
    for n, (name, values) in enumerate(members.items()):
        parts.append(f"{',' if n else '{'}{json.dumps(name, ensure_ascii=False)}:")
        parts.append(values if isinstance(values, str) else pc.fill_null(values.cast(TEXT), NULL))
    return joined(*parts, *further, "}")


def optional(name: str, values: pa.Array) -> pa.Array:
    """A member that is left out where it is null, for the end of :func:`objects`."""
    member = joined(f",{json.dumps(name, ensure_ascii=False)}:", values.cast(TEXT))
    return pc.fill_null(member, "")


def joined(*parts: pa.Array | str) -> pa.Array:
    """Texts side by side; null where one of them is."""
    texts = [pa.scalar(part, TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*texts, pa.scalar("", TEXT))
