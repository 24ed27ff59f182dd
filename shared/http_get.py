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
    request = urllib.request.Request(url, headers=dict(headers or {}))
    if is_here(url):
        return _directly.open(request, timeout=timeout_s)
    return urllib.request.urlopen(request, timeout=timeout_s)


def is_here(url: str) -> bool:
    """Whether its host is this machine's loopback. Raises: ValueError: it is no URL."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
