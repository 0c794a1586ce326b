"""Finds the line of the pipeline file that an error is about, by the path of the key with which its message begins."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from airflow_cdc_provider.engine.core.errors import ConfigError

_INDEX = re.compile(r"\[(\d+)\]\.?")


@contextmanager
def naming_line(path: str | os.PathLike[str]) -> Iterator[None]:
    """Prefix errors in the block with the file and the line of the key that they name.

    :param path: the pipeline file, which is valid YAML.
    """
    try:
        yield
    except ConfigError as e:
        line = _line_of(yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader), e.message)
        if line is not None:
            e.prefix_message(f"{os.fspath(path)}, line {line}")
        raise


def _line_of(node: yaml.Node | None, message: str) -> int | None:
    """Return the line of the deepest key in a document that a message begins with; ``None`` if it names no key."""
    line = None
    while True:
        if isinstance(node, yaml.SequenceNode) and (index := _INDEX.match(message)) and int(index[1]) < len(node.value):
            node, message = node.value[int(index[1])], message[index.end() :]
            line = node.start_mark.line + 1
            continue
        found = _entry(node, message) if isinstance(node, yaml.MappingNode) else None
        if found is None:
            return line
        key, node = found
        line, message = key.start_mark.line + 1, message[len(key.value) :].removeprefix(".")


def _entry(node: yaml.MappingNode, message: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the entry of a mapping whose key a message begins with; of several, the one with the longest key."""
    entries = [(key, value) for key, value in node.value if re.match(rf"{re.escape(str(key.value))}(?!\w)", message)]
    return max(entries, key=lambda entry: len(entry[0].value), default=None)
