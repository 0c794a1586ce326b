"""The commands about views of a Postgres mirror: ``preflight``, ``explain``, ``status``, ``verify`` and ``drop``."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import ConfigError, ForeignTable, MissingPrivilege, UnknownTable
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.sinks.contract import KeepsViews, ViewKeeper
from airflow_cdc_provider.engine.sinks.transactional import views
from tests.commands.command_line import CommandLine
from tests.conftest import Databases
from tests.support.databases import execute
from tests.support.pipelines import PipelineUnderTest
from tests.support.scrape import scrape
from tests.support.streaming import Streaming

WIDE = (
    "SELECT o.id, o.total, c.city, n.name AS nation FROM public.orders o LEFT JOIN public.customers c"
    " ON c.id = o.customer LEFT JOIN public.nations n ON n.id = c.nation WHERE o.total > 0"
)
SALES = (
    "SELECT c.city, count(*) AS n, sum(o.total * 0.1::float8) AS total FROM public.customers c"
    " JOIN public.orders o ON o.customer = c.id GROUP BY c.city"
)
NEVER = 10**9  # seconds; a queue is then only drained by commands that end
VIEWS = {"dwd.wide": {"sql": WIDE}, "dws.sales": {"sql": SALES, "max_rows": 2, "refresh": NEVER}}


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    """Return a pipeline of three tables with two views."""
    tables = [f"public.{name}" for name in ("orders", "customers", "nations")]
    under_test = PipelineUnderTest(tmp_path, databases, tables, sink={"views": VIEWS})
    under_test.source(
        "CREATE TABLE public.nations (id int PRIMARY KEY, name text)",
        "CREATE TABLE public.customers (id int PRIMARY KEY, city text, nation int)",
        "CREATE TABLE public.orders (id int PRIMARY KEY, customer int, total int)",
        "INSERT INTO public.nations VALUES (1, 'one'), (2, 'two')",
        "INSERT INTO public.customers SELECT n, nullif('city ' || n % 5, 'city 0'), n % 3"
        " FROM generate_series(1, 20) n",
        "INSERT INTO public.orders SELECT n, n % 25, n FROM generate_series(0, 200) n",
    )
    yield under_test
    under_test.end_commands()


@pytest.fixture
def command_line(pipeline: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(pipeline, capsys)


def keeper_of(pipeline: PipelineUnderTest) -> ViewKeeper:
    sink = sink_of(pipeline.pipeline)
    assert isinstance(sink, KeepsViews)
    return sink.view_keeper(pipeline.record.epoch)


def build(pipeline: PipelineUnderTest) -> None:
    """Copy what is not copied, apply all changes, and bring all views up to date."""
    pipeline.copy_tables()
    pipeline.apply()


def follow(pipeline: PipelineUnderTest) -> Streaming:
    """Apply all changes with a stream that stays; queues stay, too."""
    streaming, marker = Streaming.begun(pipeline), pipeline.marker()
    streaming.until(lambda: pipeline.record.applied >= marker, "the changes")
    return streaming


def copy_before_views(pipeline: PipelineUnderTest) -> ViewKeeper:
    """Copy the tables, and add the views to the file afterwards; return the keeper that builds them step by step."""
    pipeline.change(sink={"views": {}})
    pipeline.provision()
    build(pipeline)
    pipeline.change(sink={"views": VIEWS})
    return keeper_of(pipeline)


def states(pipeline: PipelineUnderTest) -> dict[str, dict[str, Any]]:
    return {view["view"]: view for view in commands.status(pipeline.pipeline)["views"]}


def compared(pipeline: PipelineUnderTest) -> dict[str, dict[str, Any]]:
    return {view["view"]: view for view in commands.verify(pipeline.pipeline)["views"]}


def finding(pipeline: PipelineUnderTest, check: str) -> Any:
    (found,) = (finding for finding in preflight(pipeline.pipeline) if finding.check == check)
    return found


def test_status_follows_a_view_from_its_beginning(pipeline: PipelineUnderTest, command_line: CommandLine) -> None:
    assert {name: view["state"] for name, view in states(pipeline).items()} == dict.fromkeys(VIEWS, "waiting")
    keeper = copy_before_views(pipeline)
    seen = {"dwd.wide": ["waiting"], "dws.sales": ["waiting"]}
    while keeper.step():
        for name, view in states(pipeline).items():
            if view["state"] != seen[name][-1]:
                seen[name].append(view["state"])
    assert seen == {name: ["waiting", "building", "up-to-date"] for name in VIEWS}
    pipeline.source(
        "UPDATE public.orders SET total = total + 1 WHERE id < 10", "UPDATE public.customers SET city = 'x'"
    )
    before = format_lsn(pipeline.record.applied)
    follow(pipeline).end()
    applied = format_lsn(pipeline.record.applied)
    wide, sales = states(pipeline)["dwd.wide"], states(pipeline)["dws.sales"]
    assert (wide["state"], wide["as_of"], wide["queued"], wide["built_percent"]) == ("up-to-date", applied, 0, 100.0)
    assert wide["anchors"] >= wide["units"] * wide["anchors_per_unit"] > 0
    assert wide["milliseconds_per_unit"] > 0
    assert (sales["state"], sales["max_rows"], sales["refresh"]) == ("queued", 2, NEVER)
    assert (sales["as_of"] != applied, sales["queued"] > 2) == (True, True)
    assert sales["as_of"] >= before
    shown = command_line.run("status")
    assert re.search(r"^dws\.sales +queued +100 % ", shown, re.MULTILINE)
    build(pipeline)
    assert states(pipeline)["dws.sales"]["as_of"] == format_lsn(pipeline.record.applied)

    pipeline.change(sink={"views": {**VIEWS, "dwd.wide": {"sql": WIDE.replace("o.total > 0", "o.total > 5")}}})
    keeper = keeper_of(pipeline)
    assert keeper.step()
    assert states(pipeline)["dwd.wide"]["state"] == "rebuilding"
    build(pipeline)
    assert states(pipeline)["dwd.wide"]["state"] == "up-to-date"


def test_verify_compares_views_with_their_selects(pipeline: PipelineUnderTest, command_line: CommandLine) -> None:
    pipeline.provision()
    pipeline.copy_tables()
    assert compared(pipeline) == {}
    build(pipeline)
    rows = {"dwd.wide": 200, "dws.sales": 5}
    assert {name: (view["equal"], view["rows"]) for name, view in compared(pipeline).items()} == {
        name: (True, count) for name, count in rows.items()
    }
    pipeline.target(
        "UPDATE dwd.wide SET city = 'wrong' WHERE id = 7",
        "DELETE FROM dwd.wide WHERE id = 8",
        "INSERT INTO dwd.wide (id) VALUES (1000)",
        "UPDATE dws.sales SET n = n + 1 WHERE city IS NULL",
        "UPDATE dws.sales SET total = total * (1 + 1e-12) WHERE city IS NOT NULL",
        "INSERT INTO dws.sales (city, n) VALUES ('city 1', 3)",
    )
    found = command_line.json("verify", code=4)
    wide, sales = found["views"]
    assert (found["equal"], all(table["equal"] for table in found["tables"])) == (False, True)
    assert {each["key"]["id"]: each["kind"] for each in wide["differences"]} == {
        "7": "different", "8": "missing", "1000": "extra",
    }  # fmt: skip
    assert {each["key"]["city"]: each["kind"] for each in sales["differences"]} == {
        None: "different", "city 1": "different",
    }  # fmt: skip
    shown = command_line.run("verify", code=4)
    assert 'dwd.wide: missing {"id": "8"}' in shown
    pipeline.target("UPDATE dws.sales SET total = total * (1 + 1e-6) WHERE city = 'city 2'")
    assert len(compared(pipeline)["dws.sales"]["differences"]) == 3


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "0", "1e-300", "1e308", None])
def test_verify_compares_floating_point_values_of_every_size(pipeline: PipelineUnderTest, value: str | None) -> None:
    pipeline.change(sink={"views": {"dws.f": {"sql": "SELECT id, max(v) AS v FROM public.orders GROUP BY id"}}})
    pipeline.source("ALTER TABLE public.orders ADD v float8 DEFAULT 1.5")
    pipeline.provision()
    build(pipeline)
    assert compared(pipeline)["dws.f"]["equal"]
    wrong = "NULL" if value is None else f"'{value}'"
    pipeline.target(f"UPDATE dws.f SET v = {wrong} WHERE id = 3")
    assert compared(pipeline)["dws.f"]["differences"] == [{"key": {"id": "3"}, "kind": "different"}]


def test_verify_leaves_out_what_is_not_computed_yet(
    pipeline: PipelineUnderTest, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "FIRST_PORTION", 50)
    keeper = copy_before_views(pipeline)
    while compared(pipeline).get("dwd.wide", {}).get("rows") != 49:
        assert keeper.step()
    wide = compared(pipeline)["dwd.wide"]
    assert (wide["equal"], wide["queued"], wide["unbuilt"]) == (True, 0, 151)
    built = states(pipeline)["dwd.wide"]["built_percent"]
    assert 0 < built < 100
    build(pipeline)
    pipeline.source("UPDATE public.customers SET city = nullif('city ' || id % 4, 'city 0')")
    follow(pipeline).end()
    sales = compared(pipeline)["dws.sales"]
    assert (sales["equal"], sales["queued"], sales["unbuilt"]) == (True, 5, 0)
    assert "dws.sales: not compared, because not computed yet: 5 queued anchors." in command_line.run("verify")


def test_explain(pipeline: PipelineUnderTest, command_line: CommandLine) -> None:
    plan = command_line.json("explain", "dwd.wide")
    assert (plan["mirrored"], plan["root"], plan["anchor"], plan["grouped"]) == (False, "o", ["id"], False)
    assert "does not exist yet" in command_line.run("explain", "dwd.wide")
    pipeline.provision()
    pipeline.copy_tables()
    pipeline.target("ANALYZE")
    plan = command_line.json("explain", "dwd.wide")
    orders, customers, nations = plan["tables"]
    assert plan["mirrored"]
    assert (orders["path"], customers["path"], nations["path"]) == (["o"], ["c", "o"], ["n", "c", "o"])
    assert orders["columns"] == ["customer", "id", "total"]
    assert customers["columns"] == ["city", "id", "nation"]
    assert (orders["rows_per_change"], customers["join"]) == (1.0, "left")
    assert customers["rows_per_change"] == pytest.approx(201 / 25, abs=0.1)
    assert nations["rows_per_change"] == pytest.approx(20 / 3 * 201 / 25, abs=0.5)
    assert len(plan["missing_indexes"]) == 2
    for statement in plan["missing_indexes"]:
        assert statement.startswith("CREATE INDEX CONCURRENTLY")
        pipeline.target(statement)
    text = command_line.run("explain", "dwd.wide")
    assert "All indexes that it needs exist." in text
    assert "└─ c = public.customers" in text
    # The SELECT runs as shown.
    pipeline.target("CREATE TEMPORARY TABLE cdc_anchors AS SELECT 7 AS a0; " + plan["select"])
    grouped = command_line.json("explain", "dws.sales")
    assert (grouped["grouped"], grouped["anchor"]) == (True, ["city"])
    assert {each["alias"]: each["rows_per_change"] for each in grouped["tables"]} == {"c": 1.0, "o": 1.0}
    pipeline.source("CREATE TABLE public.late (id int PRIMARY KEY, customer int)")
    late = {"sql": "SELECT l.id, c.city FROM public.late l JOIN public.customers c ON c.id = l.customer"}
    pipeline.change(sink={"views": {**VIEWS, "dwd.late": late}})
    with pytest.raises(ConfigError, match=r"public\.late"):
        commands.explain(pipeline.pipeline, "dwd.late")
    pipeline.change(source={"tables": [*pipeline.document["source"]["tables"], "public.late"]})
    assert not commands.explain(pipeline.pipeline, "dwd.late")["mirrored"]
    with pytest.raises(ConfigError, match=r"no view dwd\.wrong") as refused:
        commands.explain(pipeline.pipeline, "dwd.wrong")
    assert "dwd.wide, dws.sales" in refused.value.solution


def test_preflight_checks_views_before_and_after_provisioning(pipeline: PipelineUnderTest) -> None:
    before = pipeline.target_rows("SELECT oid FROM pg_class WHERE relnamespace >= 16384")
    for _ in range(2):
        assert finding(pipeline, "view dwd.wide").ok
        pipeline.change(sink={"views": {**VIEWS, "dwd.bad": {"sql": "SELECT id, nothing FROM public.orders"}}})
        with pytest.raises(ConfigError, match="the column nothing is unknown"):
            commands.preflight(pipeline.pipeline)
        pipeline.change(sink={"views": {**VIEWS, "dwd.bad": {"sql": "SELECT id, id || 1 AS x FROM public.orders"}}})
        with pytest.raises(ConfigError, match="the sink refuses its SQL"):
            commands.preflight(pipeline.pipeline)
        pipeline.change(sink={"views": {**VIEWS, "dwd.wide": {"sql": WIDE, "indexes": "print"}}})
        warned = finding(pipeline, "view dwd.wide")
        assert (warned.ok, warned.warning, warned.message.count("CREATE INDEX")) == (True, True, 2)
        pipeline.change(sink={"views": VIEWS})
        if not before:
            break
        before = []
    assert pipeline.target_rows("SELECT oid FROM pg_class WHERE relnamespace >= 16384") == []
    pipeline.target("CREATE SCHEMA dwd", "CREATE TABLE dwd.wide (id int)")
    with pytest.raises(ForeignTable, match=r"view dwd\.wide: the sink has a table of this name"):
        commands.preflight(pipeline.pipeline)
    pipeline.target("DROP SCHEMA dwd CASCADE")
    pipeline.provision()
    build(pipeline)
    assert finding(pipeline, "view dwd.wide").ok
    pipeline.source("CREATE TABLE public.late (id int PRIMARY KEY, customer int)")
    pipeline.change(source={"tables": [*pipeline.document["source"]["tables"], "public.late"]})
    late = {"sql": "SELECT l.id, c.city FROM public.late l JOIN public.customers c ON c.id = l.customer"}
    pipeline.change(sink={"views": {**VIEWS, "dwd.late": late}})
    assert finding(pipeline, "view dwd.late").ok
    assert pipeline.target_rows("SELECT to_regclass('public.late')") == [(None,)]
    pipeline.change(sink={"views": {**VIEWS, "dwd.wide": {"sql": "SELECT id, nothing FROM public.orders"}}})
    waits = finding(pipeline, "view dwd.wide")
    assert (waits.ok, waits.warning) == (True, True)
    assert "the column nothing is unknown" in waits.message


def test_preflight_names_missing_privileges(pipeline: PipelineUnderTest) -> None:
    database = pipeline.databases.target.rpartition("/")[2]
    execute(
        pipeline.databases.target,
        f"REVOKE TEMPORARY ON DATABASE {database} FROM PUBLIC",
        "CREATE SCHEMA dwd",
        "REVOKE ALL ON SCHEMA dwd FROM PUBLIC, cdc",
        "ALTER SCHEMA dwd OWNER TO postgres",
    )
    with pytest.raises(MissingPrivilege, match="create temporary tables") as refused:
        commands.preflight(pipeline.pipeline)
    statements = refused.value.solution.removeprefix("Run: ")
    assert f"GRANT TEMPORARY ON DATABASE {database} TO cdc;" in statements
    pipeline.target(statements)
    commands.preflight(pipeline.pipeline)


def test_drop_of_views_keeps_the_pipeline_and_the_other_views(
    pipeline: PipelineUnderTest, command_line: CommandLine
) -> None:
    pipeline.provision()
    build(pipeline)
    pipeline.change(sink={"views": {"dwd.wide": VIEWS["dwd.wide"]}})
    build(pipeline)
    assert states(pipeline)["dws.sales"]["state"] == "removed"
    assert "dws.sales" not in compared(pipeline)
    assert command_line.json("drop", "--views", "--yes") == {"views": ["dws.sales"]}
    assert command_line.json("drop", "--views", "--yes") == {"views": []}
    assert states(pipeline).keys() == {"dwd.wide"}
    pipeline.source("INSERT INTO public.orders VALUES (1000, 1, 1)")
    build(pipeline)
    assert compared(pipeline)["dwd.wide"]["rows"] == 201
    assert pipeline.target_rows("SELECT to_regclass('dws.sales')") == [(None,)]


def test_drop_of_views_while_a_stream_with_the_former_file_runs(pipeline: PipelineUnderTest) -> None:
    pipeline.provision()
    build(pipeline)
    streaming = follow(pipeline)
    pipeline.change(sink={"views": {"dwd.wide": VIEWS["dwd.wide"]}})
    assert commands.drop_views(pipeline.pipeline) == {"views": ["dws.sales"]}
    pipeline.source("INSERT INTO public.orders VALUES (1000, 1, 1)", "DELETE FROM public.customers WHERE id = 1")
    marker = pipeline.marker()
    streaming.until(lambda: pipeline.record.applied >= marker, "the changes")
    streaming.end()
    assert compared(pipeline) == {"dwd.wide": compared(pipeline)["dwd.wide"]}
    assert compared(pipeline)["dwd.wide"]["equal"]
    assert pipeline.target_rows("SELECT to_regclass('dws.sales')") == [(None,)]


def test_drop_leaves_views_and_removes_their_records(pipeline: PipelineUnderTest) -> None:
    pipeline.provision()
    build(pipeline)
    pipeline.change(sink={"views": {**VIEWS, "dwd.wide": {"sql": WIDE + " AND o.id > 3"}}})
    keeper = keeper_of(pipeline)
    assert keeper.step()
    tables = "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relname ~ '^(queue|airflow_cdc)_'"
    assert len(pipeline.target_rows(tables)) >= 3
    commands.drop(pipeline.pipeline)
    assert pipeline.target_rows(tables) == []
    assert pipeline.target_rows("SELECT * FROM airflow_cdc.views") == []
    assert pipeline.target_rows("SELECT count(*) FROM dwd.wide") == [(200,)]


def test_a_scrape_shows_the_views(pipeline: PipelineUnderTest) -> None:
    pipeline.change(metrics={"prometheus": "127.0.0.1:0"})
    pipeline.provision()
    build(pipeline)
    pipeline.source("UPDATE public.customers SET city = nullif('city ' || id % 4, 'city 0')")
    streaming = follow(pipeline)
    assert streaming.run_ is not None
    port, found = streaming.run_.metrics_port, dict[tuple[str, str], float]()

    def behind() -> bool:
        nonlocal found
        found = scrape(port)
        return found.get(("view_behind", "stream,,dws.sales")) == 1

    streaming.until(behind, "the view's state")
    assert found["view_built_ratio", "stream,,dwd.wide"] == found["view_built_ratio", "stream,,dws.sales"] == 1
    assert found["view_behind", "stream,,dwd.wide"] == found["view_queued", "stream,,dwd.wide"] == 0
    sales = states(pipeline)["dws.sales"]
    assert found["view_queued", "stream,,dws.sales"] == sales["queued"] > 0
    assert found["view_anchors_total", "stream,,dws.sales"] == sales["anchors"] > 0
    assert found["view_seconds_total", "stream,,dws.sales"] == sales["seconds"] > 0
    streaming.end()


def test_verify_of_a_view_without_its_table(pipeline: PipelineUnderTest) -> None:
    pipeline.provision()
    build(pipeline)
    pipeline.target("DROP TABLE dwd.wide")
    with pytest.raises(UnknownTable, match=r"view dwd\.wide: its table, or one that it reads, does not exist"):
        commands.verify(pipeline.pipeline)


def test_views_of_one_of_several_sinks_name_it(pipeline: PipelineUnderTest, command_line: CommandLine) -> None:
    pipeline.document["sink"] = [
        {**pipeline.document["sink"]},
        {"type": "files", "path": str(pipeline.directory / "f")},
    ]
    pipeline.change()
    place = pipeline.pipeline.sinks[0].place
    assert {view["sink"] for view in states(pipeline).values()} == {place}
    assert commands.explain(pipeline.pipeline, "dwd.wide")["sink"] == place
    pipeline.provision()
    assert f"dwd.wide in {place}" in command_line.run("status")


def test_preflight_names_what_the_upkeep_would_lack(pipeline: PipelineUnderTest) -> None:
    """Indexes are for the owner to create, and a name that the server would truncate is refused."""
    pipeline.provision()
    owned = "ALTER TABLE public.orders OWNER TO postgres; GRANT ALL ON public.orders TO cdc"
    pipeline.target(owned)
    with pytest.raises(MissingPrivilege, match=re.escape('does not own "public"."orders"')) as refused:
        commands.preflight(pipeline.pipeline)
    statement = refused.value.solution.removeprefix("Let the owner run: ").partition(" Or ")[0]
    for each in statement.split("; "):
        pipeline.target(each)
    commands.preflight(pipeline.pipeline)
    build(pipeline)
    assert all(view["equal"] for view in compared(pipeline).values())
    pipeline.change(sink={"views": {f"dwd.{'v' * 64}": VIEWS["dwd.wide"]}})
    with pytest.raises(ConfigError, match="truncate its name"):
        commands.preflight(pipeline.pipeline)


def test_verify_is_exact_while_units_are_committed(pipeline: PipelineUnderTest) -> None:
    """The definition changes meanwhile, too, so that tables of the view are exchanged."""
    pipeline.provision()
    build(pipeline)
    results: list[dict[str, Any]] = []
    ended, failures = threading.Event(), list[BaseException]()

    def verify() -> None:
        sink = sink_of(pipeline.pipeline)
        assert isinstance(sink, KeepsViews)
        try:
            while not ended.is_set():
                results.extend(result.as_dict() for result in sink.compare_views())
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=verify)
    thread.start()
    try:
        for n in range(12):
            pipeline.source(
                f"UPDATE public.orders SET total = total + 1, customer = (id + {n}) % 25 WHERE id % 3 = {n % 3}",
                f"UPDATE public.customers SET city = nullif('city ' || (id + {n}) % 6, 'city 0')",
            )
            wide = {**VIEWS["dwd.wide"], "sql": WIDE + f" AND o.id > {n % 2}"}
            pipeline.change(sink={"views": {**VIEWS, "dwd.wide": wide}})
            build(pipeline)
    finally:
        ended.set()
        thread.join()
    assert not failures
    assert len(results) > 10
    assert [each for each in results if not each["equal"]] == []
