"""The SQL that MySQL and MariaDB have in common, for ``sqlglot``."""

from __future__ import annotations

from typing import Any

from sqlglot import exp
from sqlglot.dialects.mysql import MySQL

_BASE: Any = MySQL.Generator


def _regexp(generator: Any, like: exp.RegexpLike) -> str:
    """Return ``REGEXP``, because MariaDB has no function ``REGEXP_LIKE``."""
    if like.args.get("flag"):
        return str(generator.function_fallback_sql(like))
    return f"(({generator.sql(like, 'this')}) REGEXP ({generator.sql(like, 'expression')}))"


class CommonMysql(MySQL):
    """MySQL without what MariaDB lacks."""

    class Generator(_BASE):  # type: ignore[misc]
        """Writes SQL."""

        TRANSFORMS = {**_BASE.TRANSFORMS, exp.RegexpLike: _regexp}
