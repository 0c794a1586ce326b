"""Records the messages of Debezium for a table's changes, by ``java`` and ``mvn``: ``python -m
tests.recorded.debezium``.

Debezium's connector for Postgres reads the changes from a server that this program starts, and Kafka Connect's
JsonConverter writes them. The schemas in Avro are those of Apicurio's copy of Confluent's ``AvroData``, which is in
Maven Central.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.postgres import PostgresServer
from tests.support.databases import execute, query_rows

VERSION = "3.2.0.Final"
AVRO_DATA = "io.apicurio:apicurio-registry-utils-converter:3.0.9"
DECIMALS = ("string", "precise")
TABLE = (
    """
    CREATE TABLE public.t (id bigint, at timestamptz, "odd name" text, price numeric(12, 3), u uuid, data bytea,
        flag boolean, small smallint, n numeric, r real, f double precision, day date, local timestamp,
        local3 timestamp(3), clock time, clock3 time(3), at0 timestamptz(0), at3 timestamptz(3), doc jsonb,
        txt varchar(20), PRIMARY KEY (id, at, "odd name", price, u, data))
    """,
    "ALTER TABLE public.t REPLICA IDENTITY FULL",
)
CHANGES = (
    r"""
    INSERT INTO public.t VALUES (1, '2024-03-31 01:30:00.123456+02', E'tab\t"q" \\ / ü \u2028 \x01 \x1b <é> \U0001f600',
        -1.28, '00000000-0000-0000-0000-000000000001', '\x00ff', true, -3, 12345678901234567890.5, 0.1, 1e300,
        '2024-02-29', '2024-01-01 00:00:00.25', '2024-01-01 00:00:00.25', '12:30:00.5', '12:30:00.5',
        '2024-01-01 00:00:00.5+00', '2024-01-01 00:00:00.5+00', '{"a": [1, null]}', 'v')
    """,
    "UPDATE public.t SET small = 4, r = 1e20, f = 'NaN', n = -1.28, day = '1969-12-31' WHERE id = 1",
    "UPDATE public.t SET id = 2 WHERE id = 1",
    """
    INSERT INTO public.t (id, at, "odd name", price, u, data)
    VALUES (3, '2024-01-01 00:00:00.5+00', '', 0, 'a0000000-0000-0000-0000-000000000001', '')
    """,
    """
    UPDATE public.t SET at = '2024-01-01 00:00+00', at0 = '0044-03-15 12:00+00 BC', at3 = '12000-01-01 00:00:00.5+00'
    WHERE id = 3
    """,
    "DELETE FROM public.t WHERE id = 2",
)
MESSAGES = 11  # a change of key is two messages and a tombstone, a delete is one and a tombstone

_HERE = Path(__file__).parent
_SECONDS = 120.0
_POM = f"""
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>tests</groupId><artifactId>recorded</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>io.debezium</groupId><artifactId>debezium-embedded</artifactId><version>{VERSION}</version></dependency>
    <dependency>
      <groupId>io.debezium</groupId><artifactId>debezium-connector-postgres</artifactId><version>{VERSION}</version>
    </dependency>
    <dependency><groupId>org.apache.avro</groupId><artifactId>avro</artifactId><version>1.12.0</version></dependency>
  </dependencies>
</project>
"""


class Recorded(NamedTuple):
    """Messages in order.

    :ivar schema: schema of the values, for Kafka Connect.
    :ivar avro_key, avro_value: schemas of keys and values, in Avro.
    :ivar messages: keys, and the contents of values without their schema; a tombstone has none.
    """

    schema: dict[str, Any]
    avro_key: str
    avro_value: str
    messages: list[tuple[str, dict[str, Any] | None]]


def recorded(decimals: str) -> Recorded:
    """Return the recorded messages.

    :param decimals: Debezium's ``decimal.handling.mode``.
    """
    found = json.loads(_file(decimals).read_text(encoding="utf-8"))
    return Recorded(found["schema"], *found["avro"], [(key, value) for key, value in found["messages"]])


def _file(decimals: str) -> Path:
    return _HERE / f"debezium-{decimals}.json"


def _record(decimals: str, server: PostgresServer, jars: Path) -> None:
    database = f"recorded_{decimals}"
    execute(server.dsn(), f"CREATE DATABASE {database} TEMPLATE template0 ENCODING 'UTF8'")
    execute(server.dsn(database), *TABLE)
    arguments = [str(server.port), database, decimals, str(MESSAGES)]
    command = ["java", "-Dfile.encoding=UTF-8", "-cp", f"{jars}/*", str(_HERE / "Debezium.java"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as java:
        active = "SELECT active FROM pg_replication_slots"
        assert await_condition(lambda: query_rows(server.dsn(), active) == [(True,)], _SECONDS), "no slot is read"
        execute(server.dsn(database), *CHANGES)
        out, _ = java.communicate(timeout=_SECONDS)
    assert java.returncode == 0
    assert await_condition(lambda: query_rows(server.dsn(), active) == [(False,)], _SECONDS), "the slot is still read"
    query_rows(server.dsn(), "SELECT pg_drop_replication_slot('recorder')")
    messages = [line.split("\t") for line in out.strip("\n").split("\n")]
    _write(decimals, messages, _in_avro(messages[0], jars))


def _in_avro(messages: Sequence[str], jars: Path) -> Sequence[str]:
    command = ["java", "-Dfile.encoding=UTF-8", "-cp", f"{jars}/*", str(_HERE / "Avro.java")]
    # This is what Debezium's field.name.adjustment.mode requires for this converter.
    lines = "".join(f"{message}\n" for message in messages).replace("odd name", "odd_name")
    done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return done.stdout.splitlines()


def _write(decimals: str, messages: Sequence[Sequence[str]], avro: Sequence[str]) -> None:
    values = [json.loads(value) for _, value in messages]
    schemas = [value["schema"] for value in values if value is not None]
    assert all(schema == schemas[0] for schema in schemas)
    told = [[key, value and value["payload"]] for (key, _), value in zip(messages, values, strict=True)]
    made = {"debezium": VERSION, "schema": schemas[0], "avro": avro, "messages": told}
    _file(decimals).write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Record everything."""
    with tempfile.TemporaryDirectory(prefix="cdc-recorded-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "pom.xml").write_text(_POM)
        subprocess.run(["mvn", "-q", "-B", "dependency:copy-dependencies"], cwd=directory, check=True)
        copy = ["dependency:copy", f"-Dartifact={AVRO_DATA}", "-DoutputDirectory=target/dependency"]
        subprocess.run(["mvn", "-q", "-B", *copy], cwd=directory, check=True)
        with PostgresServer.create(directory / "source") as server:
            for decimals in DECIMALS:
                _record(decimals, server, directory / "target" / "dependency")


if __name__ == "__main__":
    main()
