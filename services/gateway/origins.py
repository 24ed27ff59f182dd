"""Which pages of other origins may read answers: CORS, which browsers keep and nobody else does.

It protects a page's visitors, not the gateway. No answer allows credentials: a browser sends no cookies and no key that
the page does not have.
"""

import re
from collections.abc import Iterable

from shared.errors import SettingsError

Headers = list[tuple[bytes, bytes]]

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+\Z", re.IGNORECASE | re.ASCII)
_NAMES = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z, \t]+\Z")
# what a client library of a page reads: which request it was, and whether and when to try again
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, x-should-retry, retry-after, retry-after-ms")
_PREFLIGHT: Headers = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"600"),
]


def check_origins(allowed: Iterable[str]) -> None:
    """Raises: SettingsError on an entry that is no `*` and that no browser ever sends."""
    for entry in allowed:
        if entry != "*" and not _ORIGIN.match(entry):
            raise SettingsError(
                f"setting gateway.allowed_origins: {entry!r}; want * or scheme://host[:port] without a path, "
                "e.g. https://chat.example.com"
            )


class Origins:
    """Those of the setting; `*` is any, none at all switches CORS off."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(each.lower().encode() for each in allowed)
        self._is_any = b"*" in self._allowed

    def _told(self, origin: bytes) -> bytes | None:
        """What a page of this origin is told; None: nothing."""
        if self._is_any:
            return b"*"
        return origin if origin in self._allowed else None

    def headers(self, asked: Headers) -> Headers:
        """For the answer to a request with these headers, whatever it is. Cost: a microsecond, as a rule."""
        if not self._allowed:
            return []
        told = None
        for name, value in asked:
            if name == b"origin":
                told = self._told(value)
        out: Headers = [] if self._is_any else [(b"vary", b"origin")]
        return out if told is None else [*out, (b"access-control-allow-origin", told), _EXPOSED]

    def preflight(self, asked: Headers) -> Headers | None:
        """What a browser hears, beside headers(), that asks by OPTIONS whether a page may send a request.

        None: it does not ask that, or may not.
        """
        given = dict(asked)
        if not {b"origin", b"access-control-request-method"} <= given.keys() or not self._told(
            given[b"origin"]
        ):
            return None
        names = given.get(b"access-control-request-headers", b"")
        return [*_PREFLIGHT, (b"access-control-allow-headers", names)] if _NAMES.match(names) else _PREFLIGHT
