"""Passwords stay secret: nothing that a run leaves behind or shows to others contains one.

The two passwords are full of characters that a URI has to escape. The tests search for their core, which no escaping
changes.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote

import pytest

from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import without_password
from local_servers.postgres import PostgresServer
from local_servers.process import find_free_port
from tests.conftest import PIPELINE_ROLE, Databases, ServerMaker, create_database
from tests.support.airflow_support import connection_json
from tests.support.databases import execute
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest

CORES = ("n0tTellingSource", "n0tTellingSink")
SOURCE, SINK = (f"p@:/?#[]% &+=ö'\"\\{core}" for core in CORES)
SINK_ROLE = "loader"
# Every role of the servers except the tests' superuser needs its password.
ACCESS = f"host all postgres all trust\nhost all {PIPELINE_ROLE},{SINK_ROLE} all scram-sha-256\n"
# Pages of the Spark UI and resources of its REST interface, below the application's path.
PAGES = ("environment/", "SQL/", "StreamingQuery/", "jobs/", "stages/", "executors/")
RESOURCES = ("environment", "sql?details=true", "jobs", "stages", "allexecutors", "storage/rdd")


@pytest.fixture
def server(make_server: ServerMaker) -> PostgresServer:
    server = make_server()
    for name in ("shop", "dw"):
        create_database(server, name)
    execute(
        server.dsn(),
        f"CREATE ROLE {SINK_ROLE} LOGIN",
        f"GRANT CREATE ON DATABASE dw TO {SINK_ROLE}",
        *(
            "ALTER ROLE {} PASSWORD '{}'".format(role, password.replace("'", "''"))
            for role, password in ((PIPELINE_ROLE, SOURCE), (SINK_ROLE, SINK))
        ),
    )
    execute(server.dsn("dw"), f"GRANT CREATE ON SCHEMA public TO {SINK_ROLE}")
    (server.data_directory / "pg_hba.conf").write_text(ACCESS)
    execute(server.dsn(), "SELECT pg_reload_conf()")
    execute(
        server.dsn("shop"),
        "CREATE TABLE public.t (id int PRIMARY KEY, body text)",
        "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 100) n",
    )
    return server


def uri(server: PostgresServer, database: str, role: str, password: str) -> str:
    """Return a DSN as a user writes it."""
    return f"postgresql://{role}:{quote(password, safe='')}@127.0.0.1:{server.port}/{database}"


def assert_clean(where: str, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    for core in CORES:
        at = data.find(core.encode())
        assert at < 0, f"{where}: …{data[max(0, at - 200) : at + 50]!r}…"


def assert_clean_files(directory: Path) -> None:
    """Check that no file below a directory contains a password."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert_clean(str(path), path.read_bytes())


class CommandLines(threading.Thread):
    """Collects the command lines of all processes until the end of a block, as ``ps`` would show them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[bytes] = set()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            for path in glob("/proc/[0-9]*/cmdline"):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    self.seen.add(file.read())

    def __enter__(self) -> CommandLines:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()


def web_ui(port: int) -> Iterator[tuple[str, str]]:
    """Return the pages of a live Spark UI, and the answers of its REST interface."""

    def get(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=30) as response:
            return str(response.read().decode())

    application = json.loads(get("api/v1/applications"))[0]["id"]
    for path in (*PAGES, *(f"api/v1/applications/{application}/{resource}" for resource in RESOURCES)):
        yield path, get(path)


def fill(pages: dict[str, str], port: int) -> bool:
    """Read the pages of a Spark UI, and return whether all of them answer already."""
    try:
        pages.update(web_ui(port))
    except (URLError, OSError):
        return False
    return True


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Use a directory with a short name for temporary files, because it also contains sockets of Spark.

    Spark's log lies with the test's other files.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    with tempfile.TemporaryDirectory(prefix="cdc-", ignore_cleanup_errors=True) as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_run_shows_no_password(
    server: PostgresServer, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source uses ``${VARIABLE}``, the sink the id of a connection; the driver is killed while it streams."""
    port = find_free_port()
    (tmp_path / "events").mkdir()
    monkeypatch.setenv("SHOP_PASSWORD", quote(SOURCE, safe=""))
    address = {"host": "127.0.0.1", "port": server.port, "login": SINK_ROLE, "password": SINK, "schema": "dw"}
    monkeypatch.setenv("AIRFLOW_CONN_DW_PG", connection_json(conn_type="postgres", **address))
    pipeline = PipelineUnderTest(
        tmp_path,
        Databases(server.dsn("shop"), server.dsn("dw")),
        ["public.t"],
        source={"dsn": f"postgresql://{PIPELINE_ROLE}:${{SHOP_PASSWORD}}@127.0.0.1:{server.port}/shop"},
        spark={
            "conf": {
                "spark.ui.enabled": "true",
                "spark.ui.port": str(port),
                "spark.log.level": "INFO",
                "spark.eventLog.enabled": "true",
                "spark.eventLog.compress": "false",
                "spark.eventLog.rolling.enabled": "false",
                "spark.eventLog.dir": f"file://{tmp_path}/events",
                "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={temporary}",
            }
        },
    )
    pipeline.document["sink"] = {"conn_id": "dw_pg"}
    pipeline.change()

    with CommandLines() as processes:
        command = pipeline.start("run", failpoint="before-spark-commit:pause")
        try:
            command.until(lambda: command.paused() == 1, "a committed batch", 2 * SECONDS)
            pages: dict[str, str] = {}
            assert await_condition(lambda: fill(pages, port), SECONDS)
            assert pages
            for page, text in pages.items():
                assert_clean(page, text)
            status = cli.main(["status", "--json", "--pipeline", str(pipeline.file)])
        finally:
            command.kill()
    assert status == 0

    assert any(b"spark" in line.lower() for line in processes.seen)
    for line in processes.seen:
        assert_clean("a command line", line)
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(100,)]
    # Pipeline file, state, checkpoint, output of the command with Spark's log, event log, temporary files.
    assert (pipeline.state / "checkpoint").is_dir()
    assert list((tmp_path / "events").iterdir())
    assert list(tmp_path.glob("home/airflow-cdc/logs/*.log"))
    assert_clean_files(tmp_path)
    assert_clean_files(temporary)
    assert_clean("the server's log", server.log_file.read_bytes())


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_tasks_that_fail_show_no_password(server: PostgresServer, temporary: Path, tmp_path: Path) -> None:
    """One ends with an error of the engine, the other with its worker, which Spark reports in detail."""
    pipeline = PipelineUnderTest(
        tmp_path,
        Databases(server.dsn("shop"), server.dsn("dw")),
        ["public.t"],
        source={"dsn": uri(server, "shop", PIPELINE_ROLE, SOURCE)},
        sink={"dsn": uri(server, "dw", SINK_ROLE, SINK)},
        spark={"conf": {"spark.log.level": "INFO"}},
    )
    pipeline.provision()
    pipeline.file.rename(temporary / "pipeline.yaml")  # the one place where they may be
    pipeline.file = temporary / "pipeline.yaml"
    for action, words in (("error", "failpoint before-chunk-read fired"), ("kill", "SparkException")):
        outcome = pipeline.run("snapshot", code=1, failpoint=f"before-chunk-read:{action}")
        assert words in outcome.stderr
    pipeline.file.unlink()
    assert len(list(tmp_path.glob("home/airflow-cdc/logs/*.log"))) == 2
    assert_clean_files(tmp_path)
    assert [path for path in temporary.rglob("*") if path.is_file()] == []


# -- messages ------------------------------------------------------------------------------------------


def test_a_refused_login_is_told_without_it(
    server: PostgresServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file itself contains DSNs with passwords, one of which is wrong."""
    pair = Databases(server.dsn("shop"), server.dsn("dw"))
    for side in ("source", "sink"):
        source = uri(server, "shop", PIPELINE_ROLE, SOURCE + "x" * (side == "source"))
        sink = uri(server, "dw", SINK_ROLE, SINK + "x" * (side == "sink"))
        pipeline = PipelineUnderTest(tmp_path, pair, ["public.t"], source={"dsn": source}, sink={"dsn": sink})
        for form in ([], ["--json"]):
            code = cli.main(["run", "--pipeline", str(pipeline.file), *form])

            assert code == 1, (side, form)
            printed = capsys.readouterr()
            assert "password authentication failed" in printed.out + printed.err, (side, form)
            assert_clean("the output", printed.out + printed.err)
        assert_clean("the pipeline's repr", repr(pipeline.pipeline))


MALFORMED = {
    "an at sign": f"postgresql://cdc:p@{CORES[0]}@127.0.0.1:1/shop",
    "a slash": f"postgresql://cdc:p/{CORES[0]}@127.0.0.1:1/shop",
    "a number sign": f"postgresql://cdc:p#{CORES[0]}@127.0.0.1:1/shop",
    "a question mark": f"postgresql://cdc:p?{CORES[0]}@127.0.0.1:1/shop",
    "a percent sign": f"postgresql://cdc:%{CORES[0]}@127.0.0.1:1/shop",
    "a bracket": f"postgresql://cdc:[{CORES[0]}@127.0.0.1:1/shop",
    "a key instead of an address": f"host=127.0.0.1 password={CORES[0]}",
    "another parameter": f"postgresql://cdc@127.0.0.1:1/shop?pasword={CORES[0]}",
    "a mapping": {"password": CORES[0]},
    "a list": [CORES[0]],
}


@pytest.mark.parametrize("dsn", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("side", ["source", "sink"])
def test_a_malformed_address_is_not_repeated(
    side: str, dsn: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not passed to a driver either, which would repeat it."""
    nowhere = Databases("postgresql://postgres@127.0.0.1:1/shop", "postgresql://postgres@127.0.0.1:1/dw")
    pipeline = PipelineUnderTest(tmp_path, nowhere, ["public.t"], **{side: {"dsn": dsn}})

    code = cli.main(["status", "--json", "--pipeline", str(pipeline.file)])

    assert code == 2
    printed = capsys.readouterr()
    assert f"{side}.dsn" in printed.out
    assert_clean("the output", printed.out + printed.err)


def test_a_message_that_repeats_it_is_masked() -> None:
    dsn = f"postgresql://cdc:{quote(SOURCE, safe='')}@db/shop?password={quote(SINK, safe='')}"
    echo = f"cannot parse {dsn}, or {SOURCE} and {SINK}"
    assert_clean("the message", without_password(echo, dsn))
    assert without_password("as it was", "postgresql://cdc@db/shop") == "as it was"
