"""What one end tells the other at link-up: where it runs, which regions it has, what each path needs. No addresses
of memory except in NIXL's own payload, which is of no use without its registration.
"""

from pathlib import Path

import msgspec

from shared.errors import PeerProtocolError
from shared.transfer.interface import Region, RegionKind
from shared.wire.codec import MALFORMED

VERSION = 1
MAX_DESCRIPTION_BYTES = 4 << 20
MAX_REGIONS = 256


class RegionDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A region as a peer sees it."""

    name: str
    kind: RegionKind
    page_bytes: int
    num_pages: int
    memory_key: str
    device_uuid: str = ""

    @property
    def num_bytes(self) -> int:
        """Length of the region."""
        return self.page_bytes * self.num_pages


class EndDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `boot_id` names the running kernel, `pid_ns` the namespace in which UCX could see our pid."""

    version: int = VERSION
    instance: str
    boot_id: str
    pid_ns: str = ""
    regions: tuple[RegionDescription, ...] = ()
    payloads: dict[str, bytes] = {}  # PathName -> what that path's connect() needs

    def region(self, name: str) -> RegionDescription | None:
        """The region of that name."""
        return next((region for region in self.regions if region.name == name), None)


def describe_region(region: Region) -> RegionDescription:
    """What may leave the process."""
    return RegionDescription(
        name=region.name,
        kind=region.kind,
        page_bytes=region.page_bytes,
        num_pages=region.num_pages,
        memory_key=region.memory_key,
        device_uuid=region.device_uuid,
    )


def encode(description: EndDescription) -> bytes:
    """For the wire."""
    return msgspec.msgpack.encode(description)


def decode(raw: bytes) -> EndDescription:
    """Raises: PeerProtocolError on anything encode() cannot have made, or another version."""
    if len(raw) > MAX_DESCRIPTION_BYTES:
        raise PeerProtocolError(f"a description of {len(raw)} bytes; at most {MAX_DESCRIPTION_BYTES}")
    try:
        found = msgspec.msgpack.decode(raw, type=EndDescription)
    except MALFORMED as error:
        raise PeerProtocolError(f"bad description of a transfer end: {error}") from error
    if found.version != VERSION:
        raise PeerProtocolError(
            f"transfer version {found.version} of {found.instance}; this end speaks {VERSION}"
        )
    names = {region.name for region in found.regions}
    if len(found.regions) > MAX_REGIONS or len(names) != len(found.regions):
        raise PeerProtocolError(f"{len(found.regions)} regions with {len(names)} names")
    if any(region.page_bytes <= 0 or region.num_pages < 0 for region in found.regions):
        raise PeerProtocolError("a region of no pages")
    return found


def this_boot_id() -> str:
    """Names the running kernel; the same in all of its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def this_pid_namespace() -> str:
    """Names the pid namespace of this process."""
    return Path("/proc/self/ns/pid").readlink().name
