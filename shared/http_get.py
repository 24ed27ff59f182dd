"""GETs of services on this machine: no proxy of the environment is asked for them."""

import ipaddress
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

NO_ANSWER = (OSError, HTTPException, ValueError)  # no server, one of something else than HTTP, or no URL

_directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_url(url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Any:
    """A reply to read and to close, as urllib's; other machines are asked as the environment says (http_proxy).

    Raises: NO_ANSWER (of the statuses from 400 on, urllib's HTTPError); reading may raise them too.
    """
    if is_here(url):
        return open_directly(url, timeout_s=timeout_s, headers=headers)
    return urllib.request.urlopen(_request(url, headers), timeout=timeout_s)


def open_directly(url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Any:
    """As open_url(), wherever it is: of services whose addresses are this cluster's own. Raises: as open_url()."""
    return _directly.open(_request(url, headers), timeout=timeout_s)


def is_here(url: str) -> bool:
    """Whether its host is this machine's loopback. Raises: ValueError: it is no URL."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _request(url: str, headers: Mapping[str, str] | None) -> urllib.request.Request:
    return urllib.request.Request(url, headers=dict(headers or {}))
