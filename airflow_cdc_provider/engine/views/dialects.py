"""The SQL of stores as ``sqlglot`` has to read and write it, where its own dialects differ from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.dialects.mysql import MySQL
from sqlglot.dialects.postgres import Postgres
from sqlglot.dialects.spark import Spark

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


class CommonSpark(Spark):
    """Spark 4, in which two quotes within a text are one."""

    class Tokenizer(Spark.Tokenizer):
        """Reads SQL."""

        STRING_ESCAPES: ClassVar[list[str]] = ["'", "\\"]


DIALECTS: Mapping[str, type[Dialect]] = {"mysql": CommonMysql, "spark": CommonSpark, "postgres": Postgres}
"""The dialects by the name of the store."""
