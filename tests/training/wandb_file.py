"""Reads the file that W&B writes offline: records of its protocol, in the log format of LevelDB."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK = 7, 32768
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Record]:
    """What stands in a `.wandb` file, in order."""
    data, place, parts = path.read_bytes(), HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def named(items: Any) -> dict[str, Any]:
    """Values by their names, as they were logged."""
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def read(folder: Path) -> dict[str, Any]:
    """Config, rows, summary, and run of the one offline log in a run folder."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, Any] = {
        "config": {},
        "rows": [],
        "summary": {},
        "runs": [],
        "artifacts": [],
        "folder": path.parent,
    }
    # Another process writes the file, and may not be done when the run is.
    for _ in range(100):
        if any(record.HasField("exit") for record in records(path)):
            break
        time.sleep(0.1)
    for record in records(path):
        if record.HasField("run"):
            found["runs"].append(record.run)
            found["config"] |= named(record.run.config.update)
        elif record.HasField("config"):
            found["config"] |= named(record.config.update)
        elif record.HasField("history"):
            found["rows"].append(named(record.history.item))
        elif record.HasField("artifact"):
            found["artifacts"].append(record.artifact)
        elif record.HasField("summary"):
            found["summary"] |= named(record.summary.update)
    return found
