"""Counters of where prompts' KV came from, over all attempts of a worker."""

from shared.engine.interface import KvUse
from shared.observe import metrics

_by_source = metrics.counter("quire_worker_prompt_tokens_total", "By origin of their KV.", ("source",))
_ENGINE, _POOL, _COMPUTED = map(_by_source.labels, ("engine", "pool", "computed"))
_BYTES_MOVED = metrics.counter("quire_worker_kv_bytes_moved_total", "Copied from pages.")
_blocks = metrics.counter("quire_worker_kv_blocks_total", "Blocks of prompts by what happened.", ("what",))
_MOVED, _REUSED, _FAILED = map(_blocks.labels, ("moved", "reused", "failed"))


def count_use(use: KvUse) -> None:
    """Once for each attempt that had output, however it ended."""
    _ENGINE.inc(use.tokens_engine)
    _COMPUTED.inc(use.tokens_computed)
    if use.tokens_pool or use.bytes_moved or use.blocks_moved or use.blocks_reused or use.failed_blocks:
        _POOL.inc(use.tokens_pool)
        _BYTES_MOVED.inc(use.bytes_moved)
        _MOVED.inc(use.blocks_moved)
        _REUSED.inc(use.blocks_reused)
        _FAILED.inc(use.failed_blocks)
