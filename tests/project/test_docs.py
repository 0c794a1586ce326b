"""The documentation, compared with the code: examples parse, commands exist, links resolve, everything is covered."""

from __future__ import annotations

import configparser
import inspect
import pkgutil
import re
import shlex
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from airflow_cdc_provider import operators, sensors
from airflow_cdc_provider.engine.commands import arguments, dispatch
from airflow_cdc_provider.engine.core import errors
from airflow_cdc_provider.engine.pipeline.kinds import SinkSettings
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.settings import MetricsSettings, SnapshotSettings, StreamSettings
from airflow_cdc_provider.engine.runs.source import AttachedSource
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sources.contract import Source
from airflow_cdc_provider.engine.spark.settings import SparkSettings
from airflow_cdc_provider.get_provider_info import get_provider_info
from tests.project.code_map import BEGIN, END, PAGE, code_map

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.yaml"))

ENVIRONMENT = {
    "SHOP_PASSWORD": "secret",
    "CDC_STATE": "/var/lib/airflow-cdc",
    "AIRFLOW_CONN_SHOP_PG": "postgresql://cdc@db:5432/shop",
    "AIRFLOW_CONN_DW_PG": "postgresql://cdc@dw:5432/dw",
    "AIRFLOW_CONN_HISTORY_PG": "postgresql://cdc@dw:5432/history",
}

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_INLINE = re.compile(r"`(airflow-cdc [^`]+)`")
_FAILPOINT = re.compile(r'\bfailpoint\("([^"]+)"\)')
# A module of tests, and the beginning of a test's name in it.
_TEST = re.compile(r"`((?:\w+/)*(?:test_\w+|sinks/contract))`(?: `([a-z]\w*)…?`)?")
_MAKE = re.compile(r"(?:^|`)make ([a-z][a-z-]*)(?=`|$)", re.MULTILINE)
# Omissions in inline code, and a sentence that describes the form of all commands.
_ABRIDGED = re.compile(r"…|\bCOMMAND\b")


def read(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def blocks(*languages: str) -> Iterator[tuple[Path, str]]:
    for document in DOCUMENTS:
        for _, language, text in _BLOCK.findall(read(document)):
            if language in languages:
                yield document, textwrap.dedent(text).strip("\n")


def anchor(heading: str) -> str:
    """Return the anchor that common renderers give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


PIPELINES = [(d.name, text) for d, text in blocks("yaml") if text.startswith("pipeline:")] + [
    (path.name, read(path)) for path in EXAMPLES
]


@pytest.mark.parametrize(("name", "text"), PIPELINES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(PIPELINES)])
def test_pipeline_files_parse(name: str, text: str) -> None:
    pipeline = Pipeline.parse(yaml.safe_load(text), ENVIRONMENT)
    assert pipeline.source.captured


def test_the_quickstart_shows_the_example() -> None:
    shown = next(text for name, text in PIPELINES if name == "quickstart.md")
    example = read(ROOT / "docs" / "examples" / "shop.yaml")
    assert yaml.safe_load(shown) == yaml.safe_load(example)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "examples").glob("*_dag.py")), ids=lambda path: path.name)
def test_examples_of_dags_are_shown_as_they_are(path: Path) -> None:
    code = read(path).partition('"""\n\n')[2] or read(path)
    assert any(inspect.cleandoc(code) == text for _, text in blocks("python")), path.name


def code_of(example: Path) -> str:
    return "\n".join(read(path) for path in sorted(example.rglob("*")) if path.suffix in (".py", ".toml"))


SNIPPETS = [text for document, text in blocks("python", "toml") if document.name == "custom.md"]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[text.splitlines()[0] for text in SNIPPETS])
def test_snippets_of_the_examples_of_a_sink_and_a_source_are_taken_from_them(snippet: str) -> None:
    code = code_of(ROOT / "docs" / "examples" / "sqlite_sink") + code_of(ROOT / "docs" / "examples" / "journal_source")
    assert any(textwrap.indent(snippet, " " * depth) in code for depth in range(0, 20, 4))


CONTRACTS: dict[str, tuple[type, ...]] = {"sinks": (Sink, SinkSettings), "sources": (Source, AttachedSource)}


@pytest.mark.parametrize("page", CONTRACTS)
def test_the_contract_names_every_method(page: str) -> None:
    text = read(ROOT / "docs" / page / "custom.md")
    for protocol in CONTRACTS[page]:
        members = {name for name in vars(protocol) if not name.startswith("_")}
        rows = re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)
        assert members <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_reference_names_every_key_and_its_default() -> None:
    text = read(ROOT / "docs" / "reference.md")
    for section, settings in (("snapshot", SnapshotSettings), ("stream", StreamSettings), ("spark", SparkSettings),
                              ("metrics", MetricsSettings)):  # fmt: skip
        for field in inspect.signature(settings).parameters:
            assert f"| `{section}.{field}` |" in text
    for key in ("pipeline", "source.type", "source.dsn", "source.conn_id", "source.tables", "source.slot",
                "source.publication", "sink.type", "sink.mode", "sink.schema", "state"):  # fmt: skip
        assert f"| `{key}` |" in text
    defaults = Pipeline.parse(
        {
            "pipeline": "warehouse",
            "source": {"dsn": "postgresql://db/shop", "tables": ["a.b"]},
            "sink": {"dsn": "postgresql://dw/dw"},
            "state": "file:///s",
        },
        {},
    )
    shown = next(
        Pipeline.parse(yaml.safe_load(text), ENVIRONMENT) for name, text in PIPELINES if name == "reference.md"
    )
    assert shown.snapshot == defaults.snapshot
    assert shown.stream == defaults.stream
    assert (shown.source.slot, shown.source.publication) == (defaults.source.slot, defaults.source.publication)
    assert (shown.sink.mode, shown.sink.schema) == (defaults.sink.mode, defaults.sink.schema)
    assert shown.spark.master == defaults.spark.master


def shown_commands() -> Iterator[tuple[str, str]]:
    for example in arguments.EXAMPLES.values():
        yield "--help", f"airflow-cdc {example}"
    for document, text in blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            if line.strip().startswith(("airflow-cdc ", ".venv/bin/airflow-cdc ")):
                yield document.name, line.strip().removeprefix(".venv/bin/")
    for document in DOCUMENTS:
        prose = _BLOCK.sub("", read(document))
        for command in _INLINE.findall(prose):
            if not _ABRIDGED.search(command):
                # In a sentence the pipeline may be omitted.
                yield document.name, command if "--pipeline" in command else f"{command} --pipeline shop.yaml"


@pytest.mark.parametrize(("document", "command"), sorted(set(shown_commands())))
def test_commands_parse(document: str, command: str) -> None:
    options = arguments.parser().parse_args(shlex.split(command, comments=True)[1:])
    assert options.command in command


def test_the_reference_names_every_command_and_option() -> None:
    text = read(ROOT / "docs" / "reference.md")
    commands = [name for group in arguments.GROUPS.values() for name in group]
    assert set(commands) == {"init", *dispatch._HANDLERS} == arguments.EXAMPLES.keys()
    for command in commands:
        assert f"| `{command}` |" in text
    for option in ("--pipeline", "--json", "--source-conn-id", "--sink-conn-id", "--mode", "--state",
                   "--takeover", "--no-spark", "--chunks", "--epoch", "--until", "--table",
                   "--where", "--all", "--yes"):  # fmt: skip
        assert re.search(rf"(\| |, )`{option}\b", text), option


def airflow_classes(package: ModuleType, pattern: str) -> set[type]:
    """Return the classes with such names in a package's modules, without those imported from elsewhere."""
    modules = [import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]
    return {
        kind
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and re.fullmatch(pattern, name)
    }


def test_the_reference_names_every_parameter_in_airflow() -> None:
    text = read(ROOT / "docs" / "airflow.md")
    kinds = airflow_classes(operators, r"Cdc\w+Operator") | airflow_classes(sensors, r"\w+Sensor")
    for kind in kinds:
        if kind.__name__ != "CdcSparkOperator":
            assert f"**`{kind.__name__}`**" in text
        for name, parameter in inspect.signature(kind.__init__).parameters.items():
            if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                assert f"`{name}`" in text, f"{kind.__name__}.{name}"


def error_classes() -> dict[str, type[errors.CdcError]]:
    return {
        name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.CdcError)
    }


@pytest.mark.parametrize("name", sorted(error_classes()))
def test_every_error_is_explained(name: str) -> None:
    text = read(ROOT / "docs" / "troubleshooting.md")
    kind = error_classes()[name]
    assert f"\n### {name}\n" in text
    retry = {errors.Retry.RETRY: "yes", errors.Retry.FAIL: "no", errors.Retry.ASK: "no, look first"}[kind.retry]
    assert f"| [{name}](#{name.lower()}) | {int(kind.exit_code)} | {retry} |" in text


def test_every_failpoint_is_in_the_table() -> None:
    sources = (ROOT / "airflow_cdc_provider").rglob("*.py")
    used = {name for source in sources for name in _FAILPOINT.findall(read(source))}
    table = read(ROOT / "docs" / "hazards.md").partition("| failpoint | what has happened |")[2].partition("\n\n")[0]
    assert used == set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))


def hazards() -> list[tuple[str, str]]:
    table = read(ROOT / "docs" / "hazards.md").partition("| hazard | precaution | test |")[2].partition("\n\n")[0]
    return [found for row in table.splitlines() for found in _TEST.findall(row.rpartition(" | ")[2])]


@pytest.mark.parametrize(("module", "name"), hazards())
def test_every_hazard_has_a_test(module: str, name: str) -> None:
    assert re.search(rf"^ *def test_{name}", read(ROOT / "tests" / f"{module}.py"), re.MULTILINE)


def test_every_metadata_column_is_in_the_table() -> None:
    from airflow_cdc_provider.engine.sinks.postgres.target_tables import CHANGELOG_COLUMNS

    text = read(ROOT / "docs" / "concepts.md")
    for column in CHANGELOG_COLUMNS:
        assert f"| `{column}` |" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in _LINK.findall(_BLOCK.sub("", read(document))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if fragment:
            assert fragment in map(anchor, _HEADING.findall(_BLOCK.sub("", read(target)))), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_prose_is_wrapped(document: Path) -> None:
    prose = _BLOCK.sub("", read(document)).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.lstrip().startswith("|")] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    docs = ROOT / "docs"
    index = re.findall(r"^:::\{toctree\}\n(?::.*\n)+\n((?:\S+\n)+):::$", read(docs / "index.md"), re.MULTILINE)
    named = [name for entries in index for name in entries.split()]
    pages = {str(path.relative_to(docs).with_suffix("")) for path in [*docs.rglob("*.md"), *docs.rglob("*.rst")]}
    assert sorted(named) == sorted(pages - {"index"})


def test_the_api_of_the_site_names_modules() -> None:
    named = re.findall(r"^\.\. autoapimodule:: (\S+)$", read(ROOT / "docs" / "api.rst"), re.MULTILINE)
    operators = [name for entry in get_provider_info()["operators"] for name in entry["python-modules"]]
    assert set(operators) <= set(named)
    assert [name for name in named if not (ROOT / f"{name.replace('.', '/')}.py").exists()] == []


def test_the_generator_of_the_site_is_pinned() -> None:
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    wanted = re.findall(r"^([\w-]+)>=", extras["options.extras_require"]["docs"], re.MULTILINE)
    lock = read(ROOT / "docs" / "requirements.lock")
    assert wanted
    assert [name for name in wanted if f"\n{name}==" not in lock] == []


def test_the_readme_shows_the_end_of_the_demo() -> None:
    recorded = ROOT / "docs" / "demo.txt"
    if not recorded.exists():
        pytest.skip("the demo has not been recorded yet")
    shown = read(ROOT / "README.md").partition("<!-- demo.txt: begin -->")[2].partition("<!-- demo.txt: end -->")[0]
    lines = shown.strip().removeprefix("```text\n").removesuffix("\n```")
    assert lines.startswith("table ")
    assert read(recorded).strip().endswith(lines)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/quickstart.md"])
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", read(ROOT / "Makefile"), re.MULTILINE))
    named = set(_MAKE.findall(read(ROOT / document)))
    assert named
    assert named <= targets


def test_the_map_of_the_code_is_that_of_the_folders() -> None:
    """To update it, run ``python -m tests.project.code_map``."""
    text = read(PAGE)
    assert code_map() == text.partition(BEGIN)[2].partition(END)[0]
