"""Addresses of services: within this machine, and where other machines of the cluster reach them."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shared.errors import SettingsError

LOOPBACK = "127.0.0.1"
HOST = re.compile(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")  # a name or an IPv4 address


@dataclass(frozen=True, slots=True)
class Joined:
    """The machine whose control plane this one's workers join."""

    host: str
    base_port: int


def parse_join(join: str) -> Joined | None:
    """HOST:BASE_PORT; None for "". Raises: SettingsError."""
    if not join:
        return None
    host, _, port = join.rpartition(":")
    good = HOST.fullmatch(host) is not None and reachable(host) == host  # not every interface
    if not good or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535 - 100:
        raise SettingsError(
            f"setting cluster.join: {join!r}; name the first machine's IPv4 address, or its host's name, and its base "
            "port (the base port, not the gateway's), e.g. 10.0.0.5:8100"
        )
    return Joined(host, int(port))


def check_address(address: str, *, joins: bool) -> None:
    """Of cluster.address. Raises: SettingsError on one that others cannot connect to."""
    if joins and not address:
        raise SettingsError(
            "setting cluster.join: also set cluster.address, this machine's address on that network"
        )
    try:
        found = ipaddress.ip_address(address or LOOPBACK)
    except ValueError as error:
        raise SettingsError(
            f"setting cluster.address: {address!r} is no IP address; e.g. 10.0.0.5"
        ) from error
    if found.version != 4:  # mempools find their network device by it
        raise SettingsError(
            f"setting cluster.address: {address!r} is an IPv6 address; machines reach each other over IPv4 only, "
            "e.g. 10.0.0.5"
        )
    if found.is_unspecified:
        raise SettingsError(
            "setting cluster.address: name one address of this machine, not all; e.g. 10.0.0.5"
        )


def machine_suffix(address: str, base_port: int) -> str:
    """What tells names of a machine that joins from others': of its address, and of its home among those there."""
    return f"-{address.replace('.', '-')}-{base_port}"


def served_at(status: Mapping[str, Any]) -> str:
    """Of a cluster's status, for people: where it serves."""
    return str(status["url"]) or f"the gateway of {status['joined']}"


def gateway_of(status: Mapping[str, Any]) -> str:
    """Of a cluster's status: its gateway's URL. Raises: SettingsError where another machine has the gateway."""
    if not status["url"]:
        raise SettingsError(
            f"this machine joined {status['joined']}, which has the gateway; name it by --url (or QUIRE_URL), "
            f"e.g. http://{in_url(status['joined'])}:8000"
        )
    return str(status["url"])


def check_url(name: str, url: str, example: str) -> None:
    """Of a server. Raises: SettingsError on what no client could connect to, whoever listens."""
    if not _is_url(url):
        typed = f"http://{url}"
        raise SettingsError(
            f"{name} {url!r} is no address of a server; try {typed if _is_url(typed) else example}"
        )


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        return bool(host) and parts.scheme in ("http", "https") and parts.port != 0 and url.isprintable()
    except ValueError:  # no port, or no name of a host
        return False


def in_url(host: str) -> str:
    """An IPv6 address in brackets, anything else as it is."""
    return f"[{host}]" if ":" in host else host


def reachable(host: str) -> str:
    """An address at which a listener on `host` answers from this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return host
    if not address.is_unspecified:
        return host
    return LOOPBACK if address.version == 4 else "::1"
