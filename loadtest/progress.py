"""Samples of a measurement that takes several calls: a file of JSON lines keeps what is finished."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Progress:
    """Args: path: the file; None: samples are in memory alone. said: what is shown of a new sample."""

    def __init__(self, path: Path | None, said: Callable[[dict[str, Any]], object] = str) -> None:
        self._path = path
        self._said = said
        self.samples: list[dict[str, Any]] = []
        if path is not None and path.is_file():
            self.samples = [json.loads(line) for line in path.read_text().splitlines()]

    def has(self, **key: Any) -> dict[str, Any] | None:
        """The sample with these values."""
        return next((s for s in self.samples if all(s.get(k) == v for k, v in key.items())), None)

    def add(self, sample: dict[str, Any]) -> None:
        """Keep it, and say it in a line."""
        self.samples.append(sample)
        if self._path is not None:
            with self._path.open("a") as target:
                target.write(json.dumps(sample) + "\n")
        print(f"  {self._said(sample)}", flush=True)
