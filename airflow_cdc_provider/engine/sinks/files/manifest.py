"""Manifests: list the files of the changelogs for readers, rewritten from the log after every commit.

``_manifest/<pipeline>.json`` names the files of all tables. It is replaced as a whole, so that its readers see all
tables after the same unit. Before that, the paths of each table's files are written to
``_manifest/<schema>/<table>.txt``, one per line; most readers can use this list directly.

The log is authoritative. A manifest can be behind it for a moment, and after a crash until the pipeline's next step.
After publishing, a process checks the log again. If the log has new entries, another process may have published a newer
manifest that was overwritten, possibly in part. So everything is published again.
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
from airflow_cdc_provider.engine.sinks.files.data_file import DataFile, file_schema, files_of
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents

FOLDER = "_manifest"
_NUMBER = re.compile(rb'^\{"number": (\d+)')
_NUMBER_BYTES = 64

_listed: dict[tuple[Storage, str], tuple[int, Mapping[str, bytes]]] = {}
"""By manifest, the number that this process has last written, and the lists at that time."""

_publishing = threading.RLock()


def publish(root: Storage, pipeline: str, newest: Callable[[], Head | None]) -> None:
    """Update a pipeline's manifest and the lists of its tables to its log, unless they are current.

    :param newest: returns the current head of the log.
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
            if _published(root, name) <= head.number:  # checked again, so that a newer manifest is not overwritten
                root.replace(name, text)
                _listed[root, name] = head.number, lists
            failpoint("after-manifest")
            published, head = head, newest()
            overtaken = True
            if head is not None and head.number == published.number:
                return


def manifest(root: Storage, pipeline: str, head: Head) -> dict[str, Any]:
    """Return a pipeline's manifest, with its number first."""
    tables = {}
    for folder, files in _by_folder(head.contents).items():
        version = file_schema(head.contents, folder).version
        schema, name = map(unquote, folder.split("/"))
        tables[f"{schema}.{name}"] = {
            "schema": schema,
            "name": name,
            "version": version,
            "files": [_file_entry(root, file) for file in files if file.version == version],
            "earlier": [_file_entry(root, file) for file in files if file.version < version],
        }
    applied = head.contents["head"]["applied"]
    return {"number": head.number, "pipeline": pipeline, "applied": applied, "tables": tables}


def published(root: Storage, pipeline: str, folder: str) -> list[DataFile]:
    """Return the files of a target that the manifest names, for use when there is no log."""
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


def _lists(root: Storage, contents: Contents) -> dict[str, bytes]:
    """Return, by name of each table's list, the paths of the files that can be read together."""
    found = {}
    for folder, files in _by_folder(contents).items():
        version = file_schema(contents, folder).version
        paths = (root.location(file.path) for file in files if file.version == version)
        found[f"{FOLDER}/{folder}.txt"] = "".join(f"{path}\n" for path in paths).encode()
    return found


def _file_entry(root: Storage, file: DataFile) -> dict[str, Any]:
    values = file.to_dict()
    names = ("version", "date", "rows", "size", "first", "last")
    return {"path": root.location(file.path)} | {name: values[name] for name in names}


def _published(root: Storage, name: str) -> int:
    """Return the number of the existing manifest."""
    found = _NUMBER.match(root.read(name, _NUMBER_BYTES) or b"")
    return int(found[1]) if found else 0
