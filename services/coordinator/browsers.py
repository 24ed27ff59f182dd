"""What browsers say of the page behind a request. Without keys that is all that tells a member from a page of any site,
which a browser in this network has open."""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from fastapi import Request

READING = frozenset({"GET", "HEAD", "OPTIONS"})


def is_foreign(request: Request, own_names: Collection[str]) -> bool:
    """Whether a page that is not this coordinator's would change something. Who is no browser names no page.

    A name that somebody else gave this address (DNS rebinding) makes the page its own in the browser's eyes alone: an
    own page is at an address, at localhost, or at one of own_names.
    """
    headers = request.headers
    if request.method in READING:
        return False
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        said = urlsplit(origin)
        return said.netloc.lower() != headers.get("host", "").lower() or not _is_own(
            said.hostname or "", own_names
        )
    except ValueError:
        return True


def _is_own(name: str, own_names: Collection[str]) -> bool:
    if name == "localhost" or name in own_names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
