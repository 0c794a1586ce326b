"""Paths of a lake: the key ``path`` of a pipeline file's ``sink`` section, and the folders of targets below it."""

from __future__ import annotations

import re

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section_values import as_text

# What Hive escapes in the values of partitions, and what hides a folder. Dots also stand for other folders, and go at
# the end of names in some stores.
_SPECIAL = re.compile(r"""^_|[\x00-\x1f\x7f"#%'*./:=?\[\\\]^{}]""")
_PATTERN = frozenset("*?[]{}\\")


def as_path(value: object) -> str:
    """A URL without user and password, or an absolute path; for driver and executors it must be the same folder.

    :raises ValueError: saying what would be right.
    :raises ConfigError: when it names a user, without showing it.
    """
    text = as_text(value).rstrip("/")
    scheme, separator, rest = text.partition("://")
    if not separator and not text.startswith("/"):
        raise ValueError("an absolute path, or a URL such as s3://bucket/folder")
    # In Azure's, what stands before the @ is the container.
    if separator and scheme not in ("abfs", "abfss") and "@" in rest.partition("/")[0]:
        raise ConfigError(
            "sink.path: the URL names a user or a password",
            "Give a URL without user and password; the store's library finds them in the environment.",
        )
    if _PATTERN & set(text):
        raise ValueError("a path without any of *?[]{}\\, which readers take for patterns")
    return text


def folder(schema: str, name: str) -> str:
    """The folder of a target, by Hive's escapes, of which every store and reader takes each part for a plain name."""
    return "/".join(_SPECIAL.sub(lambda found: f"%{ord(found[0]):02X}", part) for part in (schema, name))
