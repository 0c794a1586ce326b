"""Protection of connections to MySQL: TLS, unless the connection stays on the machine or the file disables it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, TypeAlias, cast

from airflow_cdc_provider.engine.core.errors import ConfigError

SslMode: TypeAlias = Literal["disabled", "required", "verify_ca", "verify_identity"]

MODES = ("disabled", "required", "verify_ca", "verify_identity")
"""Values of ``ssl_mode``: no TLS; TLS without verification; TLS with a verified certificate; also with a
verified name.
"""

_FILES = ("ssl_ca", "ssl_cert", "ssl_key")


def mode_of(options: Mapping[str, str]) -> SslMode:
    """Return the protection of a connection.

    :param options: options of the DSN. If an authority is named, the certificate is verified.
    :raises ValueError: when they contradict each other.
    """
    default = "verify_identity" if "ssl_ca" in options else "required"
    if "unix_socket" in options:
        default = "verify_ca" if "ssl_ca" in options else "required" if "ssl_cert" in options else "disabled"
    mode = options.get("ssl_mode", default).lower().replace("-", "_")
    if mode not in MODES:
        raise ValueError(f"ssl_mode as one of {', '.join(MODES)}")
    if mode == "disabled" and any(name in options for name in _FILES):
        raise ValueError("either ssl_mode=disabled or TLS files")
    if mode == "required" and "ssl_ca" in options:
        raise ValueError("either ssl_mode=required, which verifies nothing, or ssl_ca")
    if "ssl_key" in options and "ssl_cert" not in options:
        raise ValueError("ssl_cert with ssl_key")
    return cast(SslMode, mode)


def context(options: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the TLS context; ``None`` without TLS. It is shared, because loading the authorities takes milliseconds.

    :raises ConfigError: when a file cannot be read.
    """
    mode = mode_of(options)
    if mode == "disabled":
        return None
    files = tuple(options.get(name) for name in _FILES)
    try:
        # Replaced files, such as renewed certificates, are read again.
        return _context(mode, files, tuple(file and os.stat(file).st_mtime_ns for file in files))
    except OSError as e:  # ssl.SSLError is one
        named = ", ".join(f"{name}={file}" for name, file in zip(_FILES, files, strict=True) if file)
        raise ConfigError(
            f"cannot use the TLS files ({named}): {e.strerror or e}",
            "Set paths in `sink.dsn` to PEM files that exist where the driver and the executors run.",
        ) from e


@lru_cache(maxsize=16)
def _context(mode: SslMode, files: tuple[str | None, ...], _changed: tuple[object, ...]) -> ssl.SSLContext:
    authority, certificate, key = files
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = mode == "verify_identity"
    # Authorities that MySQL creates automatically lack extensions that Python requires since 3.13.
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
