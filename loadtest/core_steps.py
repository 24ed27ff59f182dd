"""Step times that shared/engine/measured.py wrote: which of them count."""

from pathlib import Path


def decode_steps(path: Path, begin_s: float, end_s: float, num_requests: int) -> list[float]:
    """Intervals in ms of the steps between two moments in which all requests, and nothing else, decoded."""
    out: list[float] = []
    was_decode = False
    for line in path.read_text().splitlines() if path.exists() else ():
        end, interval_ms, requests, tokens = line.split()
        is_decode = int(requests) == int(tokens) == num_requests
        if is_decode and was_decode and begin_s < float(end) < end_s:
            out.append(float(interval_ms))
        was_decode = is_decode
    return out
