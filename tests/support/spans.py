"""The spans of one request, from a cluster's local store."""

import json
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0


def spans_of_request(home: Path, request_id: str, *, until: Set[str]) -> list[dict[str, Any]]:
    """All spans of its trace as soon as one of each name is there: each service writes its own in batches."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = _of_trace(_written(home), request_id)
        names = {span["name"] for span in found}
        if until <= names:
            return found
        assert time.monotonic() < deadline, f"no {sorted(until - names)} in {sorted(names)}"
        time.sleep(0.1)


def _written(home: Path) -> list[dict[str, Any]]:
    spans = []
    for path in home.rglob("*.jsonl"):
        whole = path.read_text().rpartition("\n")[0]  # the last line may be on its way
        spans += [json.loads(line) for line in whole.splitlines()]
    return [span for span in spans if "trace_id" in span]


def _of_trace(spans: list[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
    traces = {
        s["trace_id"] for s in spans if s["attributes"].get("quire.request_id", "").startswith(request_id)
    }
    return [span for span in spans if span["trace_id"] in traces]
