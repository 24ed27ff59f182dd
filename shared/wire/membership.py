"""Bodies of the coordinator's REST API, as its clients see them (JSON through msgspec).

POST   /v1/instances                register -> Registered
POST   /v1/instances/{id}/heartbeat Heartbeat -> HeartbeatReply; 404 unknown, 409 stale epoch: register again
DELETE /v1/instances/{id}?epoch=E   orderly end
GET    /v1/instances                InstanceList
"""

from msgspec import Struct

from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription
from shared.wire.reports import Role


class Register(Struct, frozen=True, kw_only=True):
    """A process that starts (again) under an instance id. Each registration gets a new, larger epoch."""

    instance: InstanceId
    role: Role
    endpoint: str
    host: str  # boot id of the host: equal for processes that can share memory
    description: EngineDescription
    pid: int = 0


class Registered(Struct, frozen=True, kw_only=True):
    """The instance is a member from now until it misses heartbeats for ttl_ms."""

    epoch: Epoch
    heartbeat_interval_ms: int
    ttl_ms: int


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Sent every heartbeat_interval_ms."""

    epoch: Epoch
    num_running: int = 0
    num_waiting: int = 0
    kv_used_share: float = 0.0


class HeartbeatReply(Struct, frozen=True, kw_only=True):
    """ttl_ms counts from when the heartbeat was sent, so that the member always stops first."""

    ttl_ms: int


class InstanceView(Struct, frozen=True, kw_only=True):
    """One member as the coordinator knows it."""

    instance: InstanceId
    role: Role
    endpoint: str
    host: str
    epoch: Epoch
    description: EngineDescription
    age_ms: int  # since the last heartbeat
    state: str  # "live" | "suspect" | "dead"
    pid: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_used_share: float = 0.0


class InstanceList(Struct, frozen=True, kw_only=True):
    """`version` grows with every change of membership."""

    version: int
    instances: list[InstanceView]
