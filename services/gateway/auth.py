"""API keys: kept as SHA-256 digests, compared in constant time. A key may name a tenant.

The tenant salts the block hashes, so two tenants never share KV, and it has its own concurrency limit and weight.
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from shared.errors import SettingsError, Unauthorized
from shared.wire.requests import LARGEST_WEIGHT, LEAST_WEIGHT


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """The known keys; without any, everybody is the tenant "" and no header is needed."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in pairs]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, authorization: bytes | None) -> str:
        """Tenant of an Authorization header's value. Raises: Unauthorized."""
        if not self._tenants:
            return ""
        if not authorization:
            raise Unauthorized(
                "You didn't provide an API key. Send it as an Authorization header: 'Bearer YOUR_KEY'."
            )
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized("The Authorization header must be 'Bearer YOUR_KEY'.")
        given = hashlib.sha256(key.strip()).digest()
        found: str | None = None
        for known, tenant in self._tenants:  # no early exit: the time says nothing about which key matched
            if hmac.compare_digest(known, given):
                found = tenant
        if found is None:
            raise Unauthorized("Incorrect API key provided.")
        return found


def parse_keys_file(text: str, source: str) -> list[tuple[str, str]]:
    """Pairs of key and tenant. Raises: SettingsError with the line's number, never its content."""
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise SettingsError(f"{source}, line {number}: want `key` or `key tenant`")
        pairs.append((words[0], words[1] if len(words) == 2 else ""))
    return pairs


def load_weights(entries: list[str]) -> dict[str, float]:
    """Weights of tenants, from `tenant=weight`. Raises: SettingsError."""
    weights: dict[str, float] = {}
    for entry in entries:
        tenant, sep, text = entry.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not sep or tenant in weights or not LEAST_WEIGHT <= weight <= LARGEST_WEIGHT:
            raise SettingsError(
                f"setting gateway.tenant_weights: {entry!r}; want tenant=weight once a tenant, from {LEAST_WEIGHT} to "
                f"{LARGEST_WEIGHT:g}, e.g. acme=4"
            )
        weights[tenant] = weight
    return weights


def _text_of(api_keys_file: str) -> str:
    """Raises: SettingsError."""
    try:
        if not Path(api_keys_file).is_file():  # each process reads it, and a pipe only gives once
            raise SettingsError(f"setting gateway.api_keys_file: no file {api_keys_file!r}")
        return Path(api_keys_file).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"setting gateway.api_keys_file: cannot read {api_keys_file!r}: {error.strerror}"
        ) from error
    except UnicodeDecodeError:  # without it as a cause: it holds the keys
        raise SettingsError(f"setting gateway.api_keys_file: {api_keys_file!r} is no UTF-8 text") from None


def load_keys(api_keys: list[str], api_keys_file: str) -> KeyRing:
    """Keys of the settings (`key` or `key:tenant`) and of the file, which must hold one: who names it wants keys asked
    for, and an empty file would let everybody in. Raises: SettingsError.
    """
    pairs: list[tuple[str, str]] = []
    for entry in api_keys:
        key, _, tenant = entry.partition(":")
        if not key:
            raise SettingsError("setting gateway.api_keys: an entry is empty; want key or key:tenant")
        if key[0] in '["':
            raise SettingsError(
                "setting gateway.api_keys: an entry begins as JSON does; want keys with commas between them, without "
                "brackets and quotes"
            )
        pairs.append((key, tenant))
    if api_keys_file:
        found = parse_keys_file(_text_of(api_keys_file), api_keys_file)
        if not found:
            raise SettingsError(
                f"setting gateway.api_keys_file: no key in {api_keys_file!r}; want lines of `key` or `key tenant`"
            )
        pairs += found
    return KeyRing(pairs)
