"""Paths of a lake: the key ``path`` of a pipeline file's ``sink`` section, and the folders of targets below it."""

from __future__ import annotations

import re

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section_values import as_text

# Characters that Hive escapes in values of partitions, and an underscore that hides a folder. Dots may also mean other
# folders, and some stores remove them at the end of names.
_SPECIAL = re.compile(r"""^_|[\x00-\x1f\x7f"#%'*./:=?\[\\\]^{}]""")
_PATTERN = frozenset("*?[]{}\\")


def as_path(value: object) -> str:
    """Return a URL without user and password, or an absolute path; it must mean the same folder on driver and
    executors.

    :raises ValueError: saying what would be right.
    :raises ConfigError: when it names a user, without showing it.
    """
    text = as_text(value).rstrip("/")
    scheme, separator, rest = text.partition("://")
    if not separator and not text.startswith("/"):
        raise ValueError("an absolute path, or a URL such as s3://bucket/folder")
    # In Azure's URLs, the container precedes the @.
    if separator and scheme not in ("abfs", "abfss") and "@" in rest.partition("/")[0]:
        raise ConfigError(
            "sink.path: the URL names a user or a password",
            "Give a URL without user and password; the store's library finds them in the environment.",
        )
    if _PATTERN & set(text):
        raise ValueError("a path without any of *?[]{}\\, which readers interpret as patterns")
    return text


def folder(schema: str, name: str) -> str:
    """Return the folder of a target, with Hive's escapes, so that every store and reader accepts each part as a plain
    name.
    """
    return "/".join(_SPECIAL.sub(lambda found: f"%{ord(found[0]):02X}", part) for part in (schema, name))
