"""The sinks that benchmarks write to, each with a function that sums up the result with the store's own readers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_cdc_provider.engine.sinks.delta.settings import PACKAGE as DELTA
from benchmarks.backlog import Sums, sums, total
from benchmarks.lab import KAFKA, MARIADB, Lab, create_database, drop_database
from benchmarks.shapes import Row, Shape

_PARTITIONS = 3
_SECONDS = 60.0


@dataclass(frozen=True)
class Outlet:
    """A sink, by default of Postgres; the target is a database with the pipeline's name.

    :param mode: mode of the sink.
    :param server: a server that it needs in addition to Postgres, for :func:`.laboratory`.
    :param package: a package that Spark needs.
    """

    mode: str = "mirror"
    server: str | None = None
    package: str | None = None

    def section(self, lab: Lab, name: str) -> dict[str, Any]:
        """Return the section of the pipeline file, and create everything that the sink expects to exist."""
        create_database(lab.target, name)
        return {"dsn": lab.target.dsn(name), "mode": self.mode}

    def sums(self, lab: Lab, name: str, shape: Shape) -> Sums:
        """Return sums over all tables of the target, for a mirror the same ones as :func:`.backlog.sums`."""
        return sums(lab.target.dsn(name), shape, mirror=self.mode == "mirror")

    def discard(self, lab: Lab, name: str, shape: Shape) -> None:
        """Remove everything that was written."""
        drop_database(lab.target, name)


class FilesOutlet(Outlet):
    """A changelog in Parquet files."""

    def section(self, lab: Lab, name: str) -> dict[str, Any]:
        return {"type": "files", "path": str(lab.directory / name)}

    def sums(self, lab: Lab, name: str, shape: Shape) -> Sums:
        lists = lab.directory / name / "_manifest" / "public"
        return total(
            _of_file(path, shape.row) for table in shape.names for path in (lists / f"{table}.txt").read_text().split()
        )

    def discard(self, lab: Lab, name: str, shape: Shape) -> None:
        shutil.rmtree(lab.directory / name)


def _of_file(path: str, row: Row) -> tuple[object, ...]:
    rows = pq.read_table(path, columns=["id", row.touched])
    return len(rows), pc.sum(rows["id"]).as_py(), pc.sum(rows[row.touched]).as_py()


class DeltaOutlet(Outlet):
    """Tables of Delta Lake."""

    def section(self, lab: Lab, name: str) -> dict[str, Any]:
        return {"type": "delta", "path": str(lab.directory / name), "mode": self.mode}

    def sums(self, lab: Lab, name: str, shape: Shape) -> Sums:
        folder = lab.directory / name / "public"
        wanted = shape.row.sums if self.mode == "mirror" else shape.row.sums[:3]
        tables = (lab.spark.read.format("delta").load(str(folder / table)) for table in shape.names)
        return total(tuple(table.selectExpr(*wanted).collect()[0]) for table in tables)

    def discard(self, lab: Lab, name: str, shape: Shape) -> None:
        shutil.rmtree(lab.directory / name)


class MysqlOutlet(Outlet):
    """Tables of MariaDB."""

    def section(self, lab: Lab, name: str) -> dict[str, Any]:
        assert lab.mariadb is not None
        return {"type": "mysql", "dsn": lab.mariadb.dsn, "schema": name, "mode": self.mode}

    def sums(self, lab: Lab, name: str, shape: Shape) -> Sums:

        def of_tables() -> Iterator[tuple[object, ...]]:
            for table in shape.names:
                cursor.execute(f"SELECT {', '.join(shape.row.sums)} FROM {name}.{table}")
                yield from cursor.fetchall()

        assert lab.mariadb is not None
        with closing(lab.mariadb.connect()) as connection, connection.cursor() as cursor:
            return total(of_tables())

    def discard(self, lab: Lab, name: str, shape: Shape) -> None:
        assert lab.mariadb is not None
        with closing(lab.mariadb.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name}")


class KafkaOutlet(Outlet):
    """Topics with Debezium change events."""

    def section(self, lab: Lab, name: str) -> dict[str, Any]:
        assert lab.kafka is not None
        return {"type": "kafka", "brokers": lab.kafka.brokers, "partitions": _PARTITIONS}

    def sums(self, lab: Lab, name: str, shape: Shape) -> Sums:
        """Return sums over the committed messages."""
        rows = (json.loads(value)["after"] for value in _values(lab, self._topics(name, shape)))
        return total((1, row["id"], row[shape.row.touched]) for row in rows)

    def discard(self, lab: Lab, name: str, shape: Shape) -> None:
        assert lab.kafka is not None
        client = AdminClient({"bootstrap.servers": lab.kafka.brokers})
        for deleted in client.delete_topics(self._topics(name, shape)).values():
            deleted.result(_SECONDS)

    def _topics(self, name: str, shape: Shape) -> list[str]:
        return [f"{name}.public.{table}" for table in shape.names]


def _values(lab: Lab, topics: Sequence[str]) -> Iterator[bytes]:
    """Read all committed messages of topics with a plain consumer."""
    assert lab.kafka is not None
    conf: dict[str, Any] = {
        "bootstrap.servers": lab.kafka.brokers,
        "group.id": "bench",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
    }
    with closing(Consumer(conf)) as consumer:
        left = {(topic, partition) for topic in topics for partition in range(_PARTITIONS)}
        consumer.assign([TopicPartition(*place, 0) for place in left])
        while left:
            for message in consumer.consume(10_000, 0.2):
                error = message.error()
                if error is None:
                    yield message.value() or b""
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard((message.topic(), message.partition()))
                else:
                    raise KafkaException(error)


OUTLETS = {
    "mirror": Outlet(),
    "changelog": Outlet("changelog"),
    "files": FilesOutlet("changelog"),
    "delta": DeltaOutlet(package=DELTA),
    "delta-changelog": DeltaOutlet("changelog", package=DELTA),
    "mysql": MysqlOutlet(server=MARIADB),
    "kafka": KafkaOutlet("changelog", server=KAFKA),
}
