"""Manifests: what readers are told of the changelogs, made anew from the log after every commit.

``_manifest/<pipeline>.json`` names the files of all tables. It is replaced whole, so who reads it sees all tables after
the same unit. Before that, the paths of each table's files are listed in ``_manifest/<schema>/<table>.txt``, one a
line, which most readers take as it is.

The log is the truth: a manifest can be behind it for a moment, and after a crash until the next step of the pipeline.
Whoever has published looks at the log again. If that has gone on, another may have published something newer, which
ours has replaced, be it in part; so it is all published again.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.sinks.files.data_file import DataFile, files_of, shape_of
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.lake.storage import Place
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents

FOLDER = "_manifest"
_NUMBER = re.compile(rb'^\{"number": (\d+)')
_NUMBER_BYTES = 64

_listed: dict[tuple[Place, str], tuple[int, Mapping[str, bytes]]] = {}
"""By manifest the number that this process has last written, and the lists that it has left then."""

_publishing = threading.RLock()


def publish(root: Place, pipeline: str, newest: Callable[[], Head | None]) -> None:
    """Bring a pipeline's manifest, and the lists of its tables, up to its log, unless they are.

    :param newest: the head of the log as it is now.
    """
    name = f"{FOLDER}/{pipeline}.json"
    with _publishing:
        head, overtaken = newest(), False
        while head is not None:
            before = _published(root, name)
            if before >= head.number and not overtaken:
                return
            failpoint("before-manifest")
            text = json.dumps(manifest(root, pipeline, head)).encode()
            number, listed = _listed.pop((root, name), (0, {}))
            known = listed if number == before and not overtaken else {}
            lists = _lists(root, head.contents)
            for list_, paths in lists.items():
                if known.get(list_) != paths:
                    root.replace(list_, paths)
            failpoint("in-manifest")
            if _published(root, name) <= head.number:  # looked at again, lest something newer be taken back
                root.replace(name, text)
                _listed[root, name] = head.number, lists
            failpoint("after-manifest")
            published, head = head, newest()
            overtaken = True
            if head is not None and head.number == published.number:
                return


def manifest(root: Place, pipeline: str, head: Head) -> dict[str, Any]:
    """What a pipeline's manifest says. Its number comes first."""
    tables = {}
    for folder, files in _by_folder(head.contents).items():
        version = shape_of(head.contents, folder).version
        schema, name = map(unquote, folder.split("/"))
        tables[f"{schema}.{name}"] = {
            "schema": schema,
            "name": name,
            "version": version,
            "files": [_told(root, file) for file in files if file.version == version],
            "earlier": [_told(root, file) for file in files if file.version < version],
        }
    applied = head.contents["head"]["applied"]
    return {"number": head.number, "pipeline": pipeline, "applied": applied, "tables": tables}


def published(root: Place, pipeline: str, folder: str) -> list[DataFile]:
    """The files of a target that the manifest names, for want of a log."""
    found = root.read(f"{FOLDER}/{pipeline}.json")
    tables = {} if found is None else json.loads(found)["tables"]
    table = tables.get(".".join(map(unquote, folder.split("/"))), {"files": [], "earlier": []})
    prefix = root.location("")
    return [
        DataFile.from_dict(file | {"path": file["path"].removeprefix(prefix).lstrip("/"), "folder": folder})
        for file in table["earlier"] + table["files"]
    ]


def _by_folder(contents: Contents) -> dict[str, list[DataFile]]:
    found: defaultdict[str, list[DataFile]] = defaultdict(list)
    for folder in sorted(contents.get("shapes", {})):
        found[folder] = []
    for file in files_of(contents):
        found[file.folder].append(file)
    return found


def _lists(root: Place, contents: Contents) -> dict[str, bytes]:
    """Of each table the paths of the files that can be read together, by the name of the list."""
    found = {}
    for folder, files in _by_folder(contents).items():
        version = shape_of(contents, folder).version
        paths = (root.location(file.path) for file in files if file.version == version)
        found[f"{FOLDER}/{folder}.txt"] = "".join(f"{path}\n" for path in paths).encode()
    return found


def _told(root: Place, file: DataFile) -> dict[str, Any]:
    values = file.to_dict()
    told = ("version", "date", "rows", "size", "first", "last")
    return {"path": root.location(file.path)} | {name: values[name] for name in told}


def _published(root: Place, name: str) -> int:
    """The number of the manifest that is there."""
    found = _NUMBER.match(root.read(name, _NUMBER_BYTES) or b"")
    return int(found[1]) if found else 0
