"""What InnoDB takes of a table's definition: columns, and bytes of a row. Pure.

The server counts when a table is made, by what its columns may hold. It would refuse a staging table as it does a
target, but only when the stream has come to it: a mirror's has some columns more, and the key twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MOST_COLUMNS = 1017
_PAGE_BYTES = 8126
_ROW_BYTES = 65_535
_HEADER_BYTES = 5 + 6 + 7  # of a record, and the transaction and the place of its undo that each row has
_ROW_ID_BYTES = 6  # of a table without a key, as a staging table is

_DIGITS_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4)
_FIXED = {
    "TINYINT": 1,
    "SMALLINT": 2,
    "INT": 4,
    "BIGINT": 8,
    "DOUBLE": 8,
    "DATE": 3,
    "TIME": 6,
    "DATETIME": 8,
}
_TYPE = re.compile(r"([A-Z]+)(?:\((\d+)(?:,(\d+))?\))?")


def trouble(columns: Mapping[str, str], key: Collection[str], staged: bool, mariadb: bool) -> str:
    """Say why the server would not make a table, or the staging table beside it; empty if it would.

    :param columns: definitions by name.
    :param key: names of the columns by which a mirror's rows are found.
    :param staged: whether its staging table has columns beside these.
    :param mariadb: or MySQL, which counts characters otherwise.
    """
    kinds = list(columns.values())
    beside = [columns[name] for name in key] + ["TINYINT", "LONGTEXT", "TINYINT"] if staged else []
    if len(kinds) + len(beside) > MOST_COLUMNS:
        more = f", and {len(beside)} in its staging table" if beside else ""
        return f"it has {len(kinds)} columns{more}, of which MySQL takes {MOST_COLUMNS}"
    for what, each, header in (
        ("", kinds, _HEADER_BYTES),
        (", in its staging table", kinds + beside, _HEADER_BYTES + _ROW_ID_BYTES),
    ):
        page = header + (len(each) + 7) // 8 + sum(_page_bytes(kind, mariadb) for kind in each)
        if page >= _PAGE_BYTES:
            return f"a row may have {page} bytes in a page of InnoDB{what}, which takes less than {_PAGE_BYTES}"
        declared = (len(each) + 7) // 8 + sum(map(_declared_bytes, each))
        if declared > _ROW_BYTES:
            return f"its columns may have {declared} bytes{what}, of which MySQL takes {_ROW_BYTES}"
    return ""


def _declared_bytes(kind: str) -> int:
    """Return the bytes of a column in a row, texts of any length left out but for where they are."""
    name, length, fraction = _split(kind)
    if name.startswith("LONG"):
        return 12
    if name == "DECIMAL":
        whole = length - fraction
        return sum(4 * (digits // 9) + _DIGITS_BYTES[digits % 9] for digits in (whole, fraction))
    if name in ("VARCHAR", "CHAR"):
        return 4 * length + (2 if name == "VARCHAR" else 0)
    return length + 2 if name == "VARBINARY" else _FIXED[name]


def _page_bytes(kind: str, mariadb: bool) -> int:
    """Return the bytes that InnoDB counts of a column in a page: long values may lie elsewhere."""
    name, length, _ = _split(kind)
    if name.startswith("LONG"):
        return 21 if mariadb else 41
    if name == "CHAR":
        return 4 * length + 1 if mariadb or length <= 10 else 41
    if name.startswith("VAR"):
        return 21
    return _declared_bytes(kind)


def _split(kind: str) -> tuple[str, int, int]:
    found = _TYPE.match(kind)
    assert found is not None
    return found[1], int(found[2] or 0), int(found[3] or 0)
