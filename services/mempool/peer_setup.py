"""What UCX must know before it is loaded: the device of `peer_listen`, and no way into memory past a connection."""

import fcntl
import socket
import struct

from services.mempool.config import MempoolSettings
from shared.errors import SettingsError
from shared.transfer.config import TransferSettings, apply_ucx_environment

# Peers are other hosts. CMA and shared memory, of use on one host only, need no connection: none could be closed.
NO_SHARED_MEMORY = "^cma,posix,sysv,xpmem,knem"
_SIOCGIFADDR = 0x8915


def peer_host(peer_listen: str) -> str:
    """Of tcp://HOST:PORT."""
    return peer_listen.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def device_of(host: str) -> str:
    """The network device that has this IPv4 address first; "" when none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:  # a device without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return ""


def pins_memory(settings: MempoolSettings) -> bool:
    """Whether UCX may page-lock registered memory, for a network card's sake."""
    return settings.ucx_tls not in ("tcp", "tcp,self", "self,tcp")


def prepare_ucx(settings: MempoolSettings) -> None:
    """Into this process's environment, before NIXL is imported. Raises: SettingsError."""
    try:
        host = socket.gethostbyname(peer_host(settings.peer_listen))
    except OSError as error:
        raise SettingsError(f"setting mempool.peer_listen: {settings.peer_listen!r}: {error}") from error
    device = settings.ucx_net_devices or device_of(host)
    if not device:
        raise SettingsError(
            f"setting mempool.ucx_net_devices: no device has {host}; name those for page transfers, e.g. eth0"
        )
    apply_ucx_environment(
        TransferSettings(
            ucx_net_devices=device,
            ucx_tls=settings.ucx_tls or NO_SHARED_MEMORY,
            ucx_port_range=settings.ucx_port_range,
        )
    )
