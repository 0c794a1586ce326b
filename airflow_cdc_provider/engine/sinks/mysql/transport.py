"""How a connection to MySQL is protected: by TLS, unless it does not leave the machine or the file says otherwise."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, TypeAlias, cast

from airflow_cdc_provider.engine.core.errors import ConfigError

SslMode: TypeAlias = Literal["disabled", "required", "verify_ca", "verify_identity"]

MODES = ("disabled", "required", "verify_ca", "verify_identity")
"""What ``ssl_mode`` may be: no TLS; TLS with whoever answers; with a server that an authority vouches for; and of whose
name it does so."""

_FILES = ("ssl_ca", "ssl_cert", "ssl_key")


def mode_of(options: Mapping[str, str]) -> SslMode:
    """Return how a connection is protected.

    :param options: of the DSN. An authority that is named is there to be asked.
    :raises ValueError: when they do not go together.
    """
    default = "verify_identity" if "ssl_ca" in options else "required"
    if "unix_socket" in options:
        default = "verify_ca" if "ssl_ca" in options else "required" if "ssl_cert" in options else "disabled"
    mode = options.get("ssl_mode", default).lower().replace("-", "_")
    if mode not in MODES:
        raise ValueError(f"ssl_mode as one of {', '.join(MODES)}")
    if mode == "disabled" and any(name in options for name in _FILES):
        raise ValueError("either ssl_mode=disabled or files of TLS")
    if mode == "required" and "ssl_ca" in options:
        raise ValueError("either ssl_mode=required, which verifies nothing, or ssl_ca")
    if "ssl_key" in options and "ssl_cert" not in options:
        raise ValueError("ssl_cert with ssl_key")
    return cast(SslMode, mode)


def context(options: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return what TLS is spoken with; ``None`` without. It is shared: to load the authorities takes milliseconds.

    :raises ConfigError: when a file cannot be read.
    """
    mode = mode_of(options)
    if mode == "disabled":
        return None
    files = tuple(options.get(name) for name in _FILES)
    try:
        # Files that are replaced, as certificates are that end, are read again.
        return _context(mode, files, tuple(file and os.stat(file).st_mtime_ns for file in files))
    except OSError as e:  # ssl.SSLError is one
        named = ", ".join(f"{name}={file}" for name, file in zip(_FILES, files, strict=True) if file)
        raise ConfigError(
            f"the files of TLS cannot be used ({named}): {e.strerror or e}",
            "Give `sink.dsn` paths of PEM files that are there where the driver and the executors run.",
        ) from e


@lru_cache(maxsize=16)
def _context(mode: SslMode, files: tuple[str | None, ...], _changed: tuple[object, ...]) -> ssl.SSLContext:
    authority, certificate, key = files
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = mode == "verify_identity"
    # The authorities that MySQL makes by itself lack extensions that Python demands from 3.13 on.
    made.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if mode == "required":
        made.verify_mode = ssl.CERT_NONE
    elif authority is None:
        made.load_default_certs()
    else:
        made.load_verify_locations(authority)
    if certificate is not None:
        made.load_cert_chain(certificate, key)
    return made
