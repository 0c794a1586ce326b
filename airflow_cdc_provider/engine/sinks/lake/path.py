"""The key ``path`` of a pipeline file's ``sink`` section: the folder below which everything of a lake stands."""

from __future__ import annotations

from airflow_cdc_provider.engine.errors import ConfigError
from airflow_cdc_provider.engine.section import as_text


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
        raise ConfigError(  # which does not show the URL, unlike what becomes of a ValueError
            f"sink.path: the URL, {scheme}://…, names a user or a password",
            "Give a URL without user and password; the store's library finds them in the environment.",
        )
    return text
