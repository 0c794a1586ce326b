"""Computes the net effect of several pieces on a mirror with Spark: one row per key, so that one MERGE applies a unit.

Pieces are ordered, each with one row per key. A later row of a key replaces earlier ones. A value that was not sent is
the value of the row's earlier state. That state is in an earlier piece, if that has the row under the key from which it
came (its *origin*), and otherwise in the table. So missing values of a piece are looked up in the net effect of the
pieces before it. Values may be missing there too, with another origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from airflow_cdc_provider.engine.core.effect import ERASED, MISSING

UNKNOWN = "unknown"
"""Whether values of a row are missing everywhere."""


def latest(pieces: Sequence[DataFrame], key: Sequence[int]) -> DataFrame:
    """Return the last row of each key; within a piece, erasures come before rows.

    :param pieces: effects in order.
    :param key: numbers of the key's columns.
    """
    numbered = [piece.withColumn("piece", f.lit(n)) for n, piece in enumerate(pieces)]
    window = Window.partitionBy(*(f"c{i}" for i in key)).orderBy(f.desc("piece"), f.asc(ERASED))
    ranked = reduce(DataFrame.unionByName, numbered).withColumn("rank", f.row_number().over(window))
    return ranked.where("rank = 1").drop("piece", "rank")


def folded(pieces: Sequence[DataFrame], key: Sequence[int], width: int) -> DataFrame:
    """Return the net effect of pieces with values that were not sent; a value stays missing only if no piece has it.

    :param width: number of columns.
    """
    first, *others = (latest([piece], key) for piece in pieces)
    result = first
    for piece in others:
        result = latest([result, _resolved(piece, result, key, width)], key)
    return result


def _resolved(piece: DataFrame, before: DataFrame, key: Sequence[int], width: int) -> DataFrame:
    """Return a piece, completed with values of the net effect before it."""
    p, b = piece.alias("p"), before.alias("b")
    joined = p.join(b, _same("p.o", range(len(key)), "b.c", key), "left")
    known = f.col(f"b.{ERASED}").isNotNull()
    gone = f.coalesce(f.col(f"b.{ERASED}"), f.lit(False))

    def value(i: int) -> Column:
        lacks = f.array_contains(f"p.{MISSING}", f.lit(i))
        return f.when(lacks & known & ~gone, f.col(f"b.c{i}")).otherwise(f.col(f"p.c{i}"))

    left = f.when(known & ~gone, f.array_intersect(f"p.{MISSING}", f"b.{MISSING}")).otherwise(f.col(f"p.{MISSING}"))
    left = f.when(f.size(left) > 0, left)

    def origin(n: int) -> Column:
        value = f.when(gone, None).when(known, f.col(f"b.o{n}")).otherwise(f.col(f"p.o{n}"))
        return f.when(left.isNotNull(), value)

    return joined.select(
        f.col(f"p.{ERASED}"),
        *(value(i).alias(f"c{i}") for i in range(width)),
        left.alias(MISSING),
        *(origin(n).alias(f"o{n}") for n in range(len(key))),
    )


def filled(net: DataFrame, table: DataFrame | None, names: Sequence[str], key: Sequence[int]) -> DataFrame:
    """Return the net effect, completed with the table's values at the origins; ``unknown`` if there is no such row.

    :param table: the target; ``None`` if it is emptied first.
    :param names: names of the columns.
    """
    lacking = f.col(f"n.{MISSING}").isNotNull()
    if table is None:
        return net.alias("n").select("n.*", lacking.alias(UNKNOWN))
    kept = table.select(
        *(f.col(_quoted(name)).alias(f"t{i}") for i, name in enumerate(names)), f.lit(True).alias("there")
    ).alias("t")
    joined = net.alias("n").join(kept, lacking & _same("n.o", range(len(key)), "t.t", key), "left")
    values = [
        f.when(f.array_contains(f"n.{MISSING}", f.lit(i)), f.col(f"t.t{i}")).otherwise(f.col(f"n.c{i}")).alias(f"c{i}")
        for i in range(len(names))
    ]
    return joined.select(f.col(f"n.{ERASED}"), *values, (lacking & f.col("t.there").isNull()).alias(UNKNOWN))


def _same(ours: str, columns: Sequence[int], theirs: str, others: Sequence[int]) -> Column:
    pairs = (f.col(f"{ours}{i}") == f.col(f"{theirs}{j}") for i, j in zip(columns, others, strict=True))
    return reduce(Column.__and__, pairs)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
