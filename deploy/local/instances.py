"""What the running instances say of their speed and sizes: `quire model show` prints, `quire advise` simulates it."""

from collections.abc import Mapping
from typing import Any

from deploy.local.terminal import connect, get_json
from deploy.local.troubles import WORKERS

HOST_MEMORY = "cpu:dram"  # how the mempool names what lies behind other spaces


def instances() -> dict[str, dict[str, Any]]:
    """By name. Raises: PeerGone when no cluster runs."""
    with connect() as client:
        status = client.call(op="status")
    mempool = get_json(status["mempool_admin"] + "/status")
    return {
        service["name"]: cost_of(get_json(service["probe"].removesuffix("/ready") + "/status"), mempool)
        for service in status["services"]
        if service["name"].startswith(WORKERS)
    }


def cost_of(status: Mapping[str, Any] | None, mempool: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An instance's cost model, with its links and sizes; {} when it does not answer, or has no model.

    Args: status, mempool: what its /status and its mempool's say.
    """
    status = status or {}
    cost = status.get("cost") or {}
    if not cost.get("coefficients"):
        return cost
    return {**cost, "links": status.get("links") or {}, "engine": _sizes(status, mempool)}


def _sizes(status: Mapping[str, Any], mempool: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of its engine. What nobody says is left out."""
    found = {
        "kv_tokens": (status.get("num_kv_blocks") or 0) * (status.get("block_tokens") or 0) or None,
        "max_num_seqs": status.get("max_num_seqs"),
        "dram_tokens": _dram_tokens(status, mempool),
        "pd_caching": status.get("pd_caching"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _dram_tokens(status: Mapping[str, Any], mempool: Mapping[str, Any] | None) -> int | None:
    """Of the host memory behind the engine its share, where several have one; None: not known."""
    block_bytes, content = status.get("block_bytes") or 0, status.get("content_key")
    if mempool is None or not block_bytes or not content:
        return None
    spaces = [space for space in mempool.get("spaces") or () if space["content_key"] == content]
    behind = [space for space in spaces if HOST_MEMORY in space["devices"]]
    num_engines = sum(len(space["engines"]) for space in spaces if space not in behind)
    # both sizes are of one rank
    blocks = sum(space["num_pages"] * space["page_bytes"] for space in behind) // block_bytes
    return blocks * (status.get("block_tokens") or 0) // max(1, num_engines)
