"""Pipeline files as documents."""

from __future__ import annotations

import copy
from typing import Any

DOCUMENT: dict[str, Any] = {
    "pipeline": "shop",
    "source": {"type": "postgres", "dsn": "postgresql://cdc@db:5432/shop", "tables": ["public.orders"]},
    "sink": {"type": "postgres", "dsn": "postgresql://cdc@dw:5432/dw"},
    "state": "file:///var/lib/airflow-cdc/shop",
}


def document(**changes: Any) -> dict[str, Any]:
    """Return the document with the values at dotted paths changed; ``None`` removes a key."""
    result = copy.deepcopy(DOCUMENT)
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = result
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    return result
