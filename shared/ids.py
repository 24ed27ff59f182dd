"""Identifiers of the cluster, as distinct types."""

from typing import NewType

RequestId = NewType("RequestId", str)  # one client request, cluster wide
InstanceId = NewType("InstanceId", str)  # one running engine replica, stable across its restarts
LeaseId = NewType("LeaseId", str)
HandoffId = NewType("HandoffId", str)  # one passage of a request from prefill to decode
BlockHash = NewType("BlockHash", bytes)  # 32 bytes, chained over the prefix (shared/kv/block_hash.py)
PageId = NewType("PageId", int)  # index of a page in one mempool's page table
SpaceId = NewType(
    "SpaceId", int
)  # number of one pool of pages (one device, one kind of block) in one mempool
Epoch = NewType("Epoch", int)  # fencing number: it only grows
