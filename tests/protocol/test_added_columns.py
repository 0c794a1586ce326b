"""The values of existing rows in a column that is added at the source, whatever the target's default is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from airflow_cdc_provider.engine import commands
from tests.conftest import Databases
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

Mode = Literal["mirror", "changelog"]

# A type that has a default itself, beneath all domains.
BASE_TYPE = """
CREATE TYPE word;
CREATE FUNCTION word_in(cstring) RETURNS word LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION word_out(word) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE TYPE word (INPUT = word_in, OUTPUT = word_out, LIKE = text, DEFAULT = 'seven')
"""
TYPES = (
    "CREATE DOMAIN seven AS int DEFAULT 7",
    "CREATE DOMAIN over_seven AS seven DEFAULT 8",
    "CREATE DOMAIN several AS int[] DEFAULT '{7}'",
    "CREATE TYPE pair AS (a int, b seven)",
    "CREATE DOMAIN pairs AS pair DEFAULT '(7,7)'",
    "CREATE DOMAIN filled AS text NOT NULL",
    "CREATE DOMAIN checked AS varchar(5) CHECK (VALUE IS NOT NULL)",
    "CREATE DOMAIN over_filled AS filled",
    BASE_TYPE,
)
ADDED = {
    "none_stated": "ADD c seven DEFAULT NULL",
    "over": "ADD c over_seven DEFAULT NULL",
    "value_stated": "ADD c seven DEFAULT 5",
    "own": "ADD c seven",
    "arrays": "ADD c several DEFAULT NULL",
    "elements": "ADD c seven[]",
    "composite": "ADD c pair, ADD d pairs DEFAULT NULL",
    "base_type": "ADD c word DEFAULT NULL::text::word",
    "at_target_alone": "ADD c plain",
    "not_null": "ADD c filled DEFAULT 'q'",
    "not_null_beneath": "ADD c over_filled DEFAULT 'q'",
    "by_check": "ADD c checked DEFAULT 'q'",
    "keyless": "ADD c seven DEFAULT NULL",
    "retyped": "ALTER w TYPE filled",
}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_rows_from_before_have_the_source_s_value(databases: Databases, tmp_path: Path, mode: Mode) -> None:
    """This holds for rows in the table and, in a changelog, for deleted rows; deletes and truncates carry no values."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"], sink={"mode": mode})
    pipeline.source(*TYPES, "CREATE DOMAIN plain AS int")
    pipeline.target(*TYPES, "CREATE DOMAIN plain AS int DEFAULT 7")
    for name in ADDED:
        pipeline.source(
            f"CREATE TABLE {name} (id int, w text)",
            f"ALTER TABLE {name} {'REPLICA IDENTITY FULL' if name == 'keyless' else 'ADD PRIMARY KEY (id)'}",
            f"INSERT INTO {name} SELECT g, 'x' FROM generate_series(1, 5) g",
        )
    pipeline.provision()
    pipeline.copy_tables()
    for name, ddl in ADDED.items():
        pipeline.source(f"DELETE FROM {name} WHERE id = 1", f"ALTER TABLE {name} {ddl}")
        pipeline.source(f"UPDATE {name} SET id = 20 WHERE id = 2", f"DELETE FROM {name} WHERE id = 3")
    pipeline.apply()
    commands.resnapshot(pipeline.pipeline, tables=["public.over"])
    commands.resnapshot(pipeline.pipeline, tables=["public.none_stated"], where="id = 4")
    pipeline.source(*(f"DELETE FROM {name} WHERE id = 5" for name in ADDED))
    pipeline.apply()
    for name in ADDED:
        query = f"SELECT attname::text FROM pg_attribute WHERE attrelid = '{name}'::regclass AND attnum > 0"
        columns = [column for (column,) in pipeline.source_rows(query)]
        if mode == "changelog":
            assert_same_values(pipeline, ["id"], columns, "public", name)
            gone = ", ".join(f"{column}::text" for column in columns[1:])
            query = f"SELECT DISTINCT {gone} FROM {name} WHERE _op IN ('d', 't')"
            assert pipeline.target_rows(query) == [(None,) * len(columns[1:])], name
        else:
            texts = ", ".join(f"{column}::text" for column in columns)
            query = f"SELECT {texts} FROM {name} ORDER BY 1"
            assert pipeline.target_rows(query) == pipeline.source_rows(query), name
    pipeline.assert_verified()


def test_a_column_that_has_ended_gets_no_values(databases: Databases, tmp_path: Path) -> None:
    """This holds whatever default a user has given the column."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": "changelog"})
    pipeline.source("CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1, 1)")
    pipeline.provision()
    pipeline.copy()
    pipeline.target("ALTER TABLE t ALTER v SET DEFAULT 7")
    pipeline.source("ALTER TABLE t DROP v", "INSERT INTO t VALUES (2)")
    pipeline.apply()
    assert pipeline.target_rows("SELECT id, v FROM t ORDER BY id") == [(1, 1), (2, None)]
