"""Pipeline files and heartbeats for tests of the page CDC."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner

THIS = Owner.this()
GONE = Owner(THIS.host, THIS.pid, THIS.started + 1)
SLOT = {"restart_lsn": "0/100", "confirmed_flush_lsn": "0/180", "retained_bytes": 0x200, "wal_status": "reserved"}
ERROR = {"kind": "StreamFailed", "message": "it broke", "solution": "mend it", "retry": "retry"}


def write_file(folder: Path, name: str, **sections: Any) -> Path:
    """Write a pipeline file whose servers only workers know."""
    document = {
        "pipeline": name,
        "source": {"dsn": "postgresql://cdc:${SECRET_OF_WORKERS}@db/shop", "tables": ["public.*"]},
        "sink": {"conn_id": "known_to_workers"},
        "state": str(folder / "states" / name),
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(document | sections), encoding="utf-8")
    return path


def beat(part: str = "stream", owner: Owner = THIS, ended: bool = False, epoch: int = 1, **progress: Any) -> Heartbeat:
    return Heartbeat(owner, part, epoch, time.time(), ended, progress)
