"""Measures Kafka at either end: a table's backlog into topics, topics into MariaDB, topics into topics.

Pipelines that write to Kafka are compared with two peers that write the same keys and values, which are read back from
the topic first. One peer is a plain, non-transactional producer in one process. The other is Spark's Kafka sink, which
writes the rows of a Parquet file as one batch. A copy from topic to topic is also compared with a streaming query of
Spark alone, which writes each record at least once. The time of ``verify`` for a topic and its mirror is compared with
the stream that filled the mirror.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.chunk_ranges import choose_chunks
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.kafka.settings import PACKAGE, topic_settings
from airflow_cdc_provider.engine.sources.kafka.stream_job import Goal, TopicJob
from airflow_cdc_provider.engine.sources.kafka.topics import Topics
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import copy_chunks
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from airflow_cdc_provider.engine.spark.session import spark_session
from benchmarks.lab import ROW, SERVER_SETTINGS, TABLE_DDL, create_database, execute, fill
from benchmarks.report import Series, check, tell
from benchmarks.stream import TRANSACTION
from local_servers.jars import package_available
from local_servers.kafka import KafkaServer
from local_servers.mariadb import MariadbServer
from local_servers.postgres import PostgresServer

KAFKA = "kafka"
DEBEZIUM, JSON = "postgres to kafka, debezium", "postgres to kafka, json"
TO_MYSQL, TO_KAFKA = "kafka to mysql", "kafka to kafka"
VERIFIED = "kafka to mysql: verify"

_PARTITIONS = 3
_SECONDS = 60.0
_HALF = TRANSACTION // 2
_WARM = 5 * TRANSACTION
_COLUMNS = (
    "id BIGINT NOT NULL, customer INT, status STRING, amount DECIMAL(12, 2), created_at TIMESTAMP, note STRING,"
    " paid BOOLEAN, code STRING"
)

Message = tuple[bytes | None, bytes | None]

_names = (f"topic{n}" for n in count())


@dataclass(frozen=True)
class KafkaLab:
    """The servers, and a directory for state and output."""

    source: PostgresServer
    broker: KafkaServer
    mariadb: MariadbServer
    directory: Path

    def session(self) -> AbstractContextManager[SparkSession]:
        """Open a session in the shared, warm JVM; its start is not part of any figure."""
        topics = {"type": "kafka", "brokers": self.broker.brokers, "topics": ["t"], "columns": _COLUMNS}
        pipeline = self.pipeline("bench", {**topics, "table": "public.t", "key": ["id"]}, {"dsn": self.source.dsn()})
        return spark_session(pipeline.spark_start, "benchmark")

    def topic(self) -> str:
        """Create a topic and return its name."""
        name = next(_names)
        client = AdminClient({"bootstrap.servers": self.broker.brokers})
        client.create_topics([NewTopic(name, _PARTITIONS, 1)])[name].result(_SECONDS)
        return name

    def pipeline(self, name: str, source: dict[str, Any], sink: dict[str, Any]) -> Pipeline:
        """Return a pipeline of this lab."""
        return Pipeline.parse(
            {
                "pipeline": name,
                "source": source,
                "sink": sink,
                "state": f"file://{self.directory / 'state' / name}",
                "stream": {"trigger": "0 seconds"},  # otherwise a backlog of topics would wait
                "spark": {"master": "local[2]", "conf": {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}},
            }
        )

    def into_topics(self, name: str, **more: Any) -> dict[str, Any]:
        """Return the section of a sink that writes to the pipeline's own topics."""
        pattern = f"{name}.{{table}}"
        return {"type": "kafka", "brokers": self.broker.brokers, "partitions": _PARTITIONS, "topic": pattern, **more}


def measure(rows: int, repeat: int) -> list[Series]:
    """Run all cases with their peers, one after the other in every repeat."""
    whole = max(1, rows // TRANSACTION) * TRANSACTION
    with _laboratory() as lab:
        if whole > _WARM:
            _repeat(lab, _WARM, 1)
        return _repeat(lab, whole, repeat)


def _repeat(lab: KafkaLab, rows: int, repeat: int) -> list[Series]:
    taken: dict[str, list[float]] = {}
    peers: dict[str, tuple[str, ...]] = {}

    def note(case: str, seconds: float, *peers_of_it: str) -> None:
        taken.setdefault(case, []).append(seconds)
        peers[case] = peers_of_it
        tell(case, rows, seconds)

    topic = _fill_topic(lab, rows)
    for _ in range(repeat):
        for case, format_ in ((DEBEZIUM, "debezium"), (JSON, "json")):
            seconds, messages = _from_postgres(lab, rows, format_)
            note(case, seconds, *_peers(case))
            _measure_peers(lab, case, messages, note)
        seconds, verified = _to_mysql(lab, topic, rows)
        note(TO_MYSQL, seconds)
        note(VERIFIED, verified, TO_MYSQL)
        seconds, messages = _to_kafka(lab, topic, rows)
        note(TO_KAFKA, seconds, *_peers(TO_KAFKA), _stream_of(TO_KAFKA))
        _measure_peers(lab, TO_KAFKA, messages, note)
        note(_stream_of(TO_KAFKA), _stream_by_spark(lab, topic, rows))
    return [
        Series(case, rows, tuple(seconds), next(iter(peers[case]), None), peers[case][1:])
        for case, seconds in taken.items()
    ]


def _peers(case: str) -> tuple[str, str]:
    return f"{case}: plain producer", f"{case}: Spark's sink"


def _stream_of(case: str) -> str:
    return f"{case}: Spark's streaming query"


def _measure_peers(lab: KafkaLab, case: str, messages: Sequence[Message], note: Callable[..., None]) -> None:
    producer, spark = _peers(case)
    note(producer, _by_producer(lab, messages))
    note(spark, _by_spark(lab, messages))


# -- pipelines -----------------------------------------------------------------------------------------


def _from_postgres(lab: KafkaLab, changes: int, format_: str) -> tuple[float, list[Message]]:
    """Run the stream job over a backlog; return the seconds from the query's start to the last commit, and messages."""
    name = next(_names)
    create_database(lab.source, name)
    dsn = lab.source.dsn(name)
    execute(dsn, TABLE_DDL)
    fill(dsn, 1, _HALF)
    pipeline = lab.pipeline(name, {"dsn": dsn, "tables": ["public.t"]}, lab.into_topics(name, format=format_))
    commands.provision(pipeline)
    with lab.session() as spark, run_part(pipeline, "snapshot", None) as (run, record):
        copy_chunks(spark, run, record, choose_chunks(record), lambda progress: None)
    inserted = f"INSERT INTO public.t SELECT {ROW} FROM generate_series(k * {_HALF}::bigint + 1, (k + 1) * {_HALF}) n"
    updated = f"UPDATE public.t SET amount = amount + 1 WHERE id BETWEEN (k - 1) * {_HALF} + 1 AND k * {_HALF}"
    transactions = changes // TRANSACTION
    execute(dsn, f"DO $$ BEGIN FOR k IN 1..{transactions} LOOP {inserted}; {updated}; COMMIT; END LOOP; END $$")
    with connected(dsn) as source:
        end = emit_marker(source, "end")
    with lab.session() as spark, run_part(pipeline, "stream", None) as (run, record):
        started = time.monotonic()
        progress = StreamJob(spark, run, record, lambda progress: None).follow(end)
        seconds = time.monotonic() - started
    check(changes, progress.changes, f"{format_}: changes")
    messages = _changes(_read(lab, f"{name}.t"), format_)
    ids = sum(range(1, (transactions + 1) * _HALF + 1)) - sum(range(1, _HALF + 1)) + sum(range(1, changes // 2 + 1))
    check((changes, ids), (len(messages), sum(_id_of(value) for _, value in messages)), f"{format_}: messages, ids")
    commands.drop(pipeline)
    return seconds, messages


def _to_mysql(lab: KafkaLab, topic: str, rows: int) -> tuple[float, float]:
    """Return the seconds of the stream job, and those of comparing the topic with its mirror afterwards."""
    name = next(_names)
    pipeline = lab.pipeline(name, _source(lab, topic), {"type": "mysql", "dsn": lab.mariadb.dsn, "schema": name})
    seconds = _follow(lab, pipeline)
    with closing(lab.mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*), sum(id) FROM {name}.t")
        found = cursor.fetchall()
        check((rows, rows * (rows + 1) // 2), tuple(map(int, found[0])), f"{TO_MYSQL}: rows, ids")
    with lab.session():
        started = time.monotonic()
        told = commands.verify(pipeline)
        verified = time.monotonic() - started
    (table,) = told["tables"]
    check((True, rows), (told["equal"], table["target_rows"]), f"{VERIFIED}: equal, rows")
    return seconds, verified


def _to_kafka(lab: KafkaLab, topic: str, rows: int) -> tuple[float, list[Message]]:
    name = next(_names)
    seconds = _follow(lab, lab.pipeline(name, _source(lab, topic), lab.into_topics(name, format="json")))
    messages = _read(lab, f"{name}.t")
    _check_messages(messages, rows, TO_KAFKA)
    return seconds, messages


def _follow(lab: KafkaLab, pipeline: Pipeline) -> float:
    """Run the job over all messages of a topic; return the seconds from its query's start to the last unit's commit."""
    commands.provision(pipeline)
    goal = Goal.now(Topics(topic_settings(pipeline)))
    with lab.session() as spark, run_part(pipeline, "stream", None) as (run, _):
        started = time.monotonic()
        TopicJob(spark, run, lambda progress: None).follow(None, goal)
        return time.monotonic() - started


def _source(lab: KafkaLab, topic: str) -> dict[str, Any]:
    named = {"type": "kafka", "brokers": lab.broker.brokers, "topics": [topic]}
    return {**named, "columns": _COLUMNS, "table": "public.t", "key": ["id"]}


# -- peers ---------------------------------------------------------------------------------------------


def _by_producer(lab: KafkaLab, messages: Sequence[Message]) -> float:
    topic = lab.topic()
    producer = Producer({"bootstrap.servers": lab.broker.brokers, "acks": "all"})
    started = time.monotonic()
    _produce(producer, topic, messages)
    seconds = time.monotonic() - started
    _check_messages(_read(lab, topic), len(messages), "plain producer", messages)
    return seconds


def _by_spark(lab: KafkaLab, messages: Sequence[Message]) -> float:
    topic, file = lab.topic(), lab.directory / f"{next(_names)}.parquet"
    keys, values = (pa.array(column, pa.binary()) for column in zip(*messages, strict=True))
    pq.write_table(pa.table({"key": keys, "value": values}), file, row_group_size=1 + len(messages) // 4)
    with lab.session() as spark:
        rows = spark.read.parquet(str(file))
        started = time.monotonic()
        rows.write.format("kafka").option("kafka.bootstrap.servers", lab.broker.brokers).option("topic", topic).save()
        seconds = time.monotonic() - started
    file.unlink()
    _check_messages(_read(lab, topic), len(messages), "Spark's sink", messages)
    return seconds


def _stream_by_spark(lab: KafkaLab, source: str, rows: int) -> float:
    topic, brokers = lab.topic(), lab.broker.brokers
    options = {"kafka.bootstrap.servers": brokers, "subscribe": source, "startingOffsets": "earliest"}
    written = {"kafka.bootstrap.servers": brokers, "topic": topic, "checkpointLocation": f"{lab.directory}/of-{topic}"}
    with lab.session() as spark:
        read = spark.readStream.format("kafka").options(**options).load().select("key", "value")
        started = time.monotonic()
        query = read.writeStream.format("kafka").options(**written).trigger(availableNow=True).start()
        query.awaitTermination()
        seconds = time.monotonic() - started
    _check_messages(_read(lab, topic), rows, "Spark's streaming query")
    return seconds


# -- messages ------------------------------------------------------------------------------------------


def _fill_topic(lab: KafkaLab, rows: int) -> str:
    """Create a topic with ``rows`` messages, and return its name."""
    topic = lab.topic()
    values = (
        {
            "id": n,
            "customer": n * 31 % 100_000,
            "status": ("new", "paid", "sent", "done")[n % 4],
            "amount": f"{n * 7919 % 1_000_003 / 100:.2f}",
            "created_at": f"2024-01-{1 + n % 28:02}T10:00:00Z",
            "note": f"{n * 2_654_435_761 % (1 << 128):032x}",
            "paid": n % 3 == 0,
            "code": f"item-{n % 5000}",
        }
        for n in range(1, rows + 1)
    )
    producer = Producer({"bootstrap.servers": lab.broker.brokers})
    _produce(producer, topic, ((str(value["id"]).encode(), json.dumps(value).encode()) for value in values))
    return topic


def _produce(producer: Producer, topic: str, messages: Sequence[Message] | Iterator[Message]) -> None:
    for key, value in messages:
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    check(0, producer.flush(_SECONDS), "messages that were not delivered")


def _read(lab: KafkaLab, topic: str) -> list[Message]:
    """Read all committed messages of a topic with a plain consumer."""
    conf: dict[str, Any] = {
        "bootstrap.servers": lab.broker.brokers,
        "group.id": "bench",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
    }
    found: list[Message] = []
    with closing(Consumer(conf)) as consumer:
        consumer.assign([TopicPartition(topic, n, 0) for n in range(_PARTITIONS)])
        left = set(range(_PARTITIONS))
        while left:
            for message in consumer.consume(10_000, 0.2):
                error = message.error()
                if error is None:
                    found.append((message.key(), message.value()))
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
                else:
                    raise KafkaException(error)
    return found


def _changes(messages: Sequence[Message], format_: str) -> list[Message]:
    """Return the messages without the rows of the snapshot."""
    name = "op" if format_ == "debezium" else "_op"
    return [each for each in messages if json.loads(each[1] or b"{}").get(name) != "r"]


def _id_of(value: bytes | None) -> int:
    document = json.loads(value or b"{}")
    return int((document.get("after") or document)["id"])


def _check_messages(found: Sequence[Message], rows: int, what: str, written: Sequence[Message] | None = None) -> None:
    ids = rows * (rows + 1) // 2 if written is None else sum(_id_of(value) for _, value in written)
    check((rows, ids), (len(found), sum(_id_of(value) for _, value in found)), f"{what}: messages, ids")


# -- the lab -------------------------------------------------------------------------------------------


@contextmanager
def _laboratory() -> Iterator[KafkaLab]:
    directory = Path(tempfile.mkdtemp(prefix="cdc-bench-"))
    directory.chmod(0o755)  # servers of root run as another user
    try:
        with (
            package_available(PACKAGE),
            PostgresServer.create(directory / "source", settings=SERVER_SETTINGS) as source,
            KafkaServer.create(directory / "kafka") as broker,
            MariadbServer.create(directory / "mariadb") as mariadb,
        ):
            yield KafkaLab(source, broker, mariadb, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
