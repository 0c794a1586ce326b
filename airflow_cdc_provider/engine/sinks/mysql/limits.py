"""InnoDB's limits on a table's definition: the number of columns, and the bytes of a row. Pure.

The server checks the limits when a table is created, by the maximum sizes of its columns. It would refuse a staging
table too, but only once the stream reaches it: the staging table of a mirror has more columns, and the key twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MOST_COLUMNS = 1017
_PAGE_BYTES = 8126
_ROW_BYTES = 65_535
_HEADER_BYTES = 5 + 6 + 7  # of a record, and the transaction id and undo pointer of each row
_ROW_ID_BYTES = 6  # of a table without a key, such as a staging table

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


def exceeded_limit(columns: Mapping[str, str], key: Collection[str], staged: bool, mariadb: bool) -> str:
    """Return why the server would not create a table or its staging table; empty if it would.

    :param columns: definitions by name.
    :param key: names of the columns that identify a mirror's rows.
    :param staged: whether the staging table has additional columns.
    :param mariadb: whether the server is MariaDB; MySQL counts characters differently.
    """
    kinds = list(columns.values())
    beside = [columns[name] for name in key] + ["TINYINT", "LONGTEXT", "TINYINT"] if staged else []
    if len(kinds) + len(beside) > MOST_COLUMNS:
        more = f", and {len(beside)} in its staging table" if beside else ""
        return f"it has {len(kinds)} columns{more}, but MySQL allows {MOST_COLUMNS}"
    for what, each, header in (
        ("", kinds, _HEADER_BYTES),
        (", in its staging table", kinds + beside, _HEADER_BYTES + _ROW_ID_BYTES),
    ):
        page = header + (len(each) + 7) // 8 + sum(_page_bytes(kind, mariadb) for kind in each)
        if page >= _PAGE_BYTES:
            return f"a row may have {page} bytes in a page of InnoDB{what}, but must have less than {_PAGE_BYTES}"
        declared = (len(each) + 7) // 8 + sum(map(_declared_bytes, each))
        if declared > _ROW_BYTES:
            return f"its columns may have {declared} bytes{what}, but MySQL allows {_ROW_BYTES}"
    return ""


def _declared_bytes(kind: str) -> int:
    """Return the bytes of a column in a row; for texts of any length, only those of their location."""
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
    """Return the bytes that InnoDB counts for a column in a page; long values may be stored elsewhere."""
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
