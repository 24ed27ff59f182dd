"""Short garbage-collection pauses for processes that sit on every request's path."""

import gc

THRESHOLDS = (10_000, 20, 50)  # requests leave no cycles behind, so collections find next to nothing


def settle_heap() -> None:
    """Once, when a service is up: what was loaded so far lives as long as the process, and is never walked again.

    A full collection over an imported vLLM or FastAPI takes tens of milliseconds, in which nothing else runs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
