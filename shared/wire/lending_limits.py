"""What words and numbers of the memory market may be: they end in keys of Redis, labels, sums and floats of others.

Python counts without end, Redis' Lua only to 2**53, msgspec's writers to 2**64: a number that one of them cannot count
is refused where it comes in, at the coordinator and at the mempool alike, so that a mempool never has to report what
the coordinator would refuse.
"""

import re
from collections.abc import Sized

from shared.errors import InvalidRequest
from shared.wire.lending import (
    MAX_DURATION_MS,
    MAX_ID_CHARS,
    MAX_LENT_BYTES,
    Grant,
    LeaseReport,
    MempoolReport,
    Offer,
    Token,
)

MAX_COUNT = (1 << 63) - 1  # of what is only counted and compared: epochs, boot generations, sequence numbers
MAX_TOKEN = 1 << 52  # Redis' Lua makes the next term: beyond 2**53 adding one changes nothing
MAX_REPORTED = 8_192  # spaces, offers or leases in one report; a mempool bounds each of them below that
ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID_CHARS}}}")  # it becomes a path segment, a Redis field, a label
KEY = re.compile(r"[!-~]{0,128}")


def check_ids(**words: str) -> None:
    """Raises: InvalidRequest naming the first that is none."""
    for name, word in words.items():
        if not ID.fullmatch(word):
            raise InvalidRequest(
                f"{name} {word[:140]!r}: up to {MAX_ID_CHARS} letters, digits, '.', '_', '-'"
            )


def check_key(name: str, key: str) -> None:
    """Raises: InvalidRequest."""
    if not KEY.fullmatch(key):
        raise InvalidRequest(f"{name}: up to 128 printable ASCII characters without spaces")


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raises: InvalidRequest."""
    if not least <= value <= most:
        shown = str(value) if abs(value) <= MAX_COUNT else "a number of more than 63 bits"
        raise InvalidRequest(f"{name}: {shown} is not in {least} to {most}")


def check_token(name: str, token: Token) -> None:
    """Raises: InvalidRequest."""
    check_range(f"{name}.term", token.term, 0, MAX_TOKEN)
    check_range(f"{name}.number", token.number, 0, MAX_TOKEN)


def check_offer(offer: Offer) -> None:
    """Raises: InvalidRequest."""
    check_ids(offer_id=offer.offer_id, producer=offer.producer, mempool=offer.mempool)
    check_key("key", offer.key)
    check_range("producer_epoch", offer.producer_epoch, 0, MAX_COUNT)
    check_range("boot_generation", offer.boot_generation, 0, MAX_COUNT)
    check_range("space", offer.space, 0, MAX_COUNT)
    check_range("length_bytes", offer.length_bytes, 0, MAX_LENT_BYTES)


def check_grant(grant: Grant) -> None:
    """What a mempool keeps of it, and reports. Raises: InvalidRequest."""
    check_ids(lease_id=grant.lease_id, offer_id=grant.offer_id, consumer=grant.consumer)
    check_key("key", grant.key)
    check_token("token", grant.token)


def check_report(report: MempoolReport) -> None:
    """All of it. Cost: O(its size). Raises: InvalidRequest."""
    check_range("boot_generation", report.boot_generation, 0, MAX_COUNT)
    check_range("seq", report.seq, 0, MAX_COUNT)
    check_token("fence", report.fence)
    lists: dict[str, Sized] = {"spaces": report.spaces, "offers": report.offers, "leases": report.leases}
    for name, listed in lists.items():
        check_range(f"{name}: their number", len(listed), 0, MAX_REPORTED)
    for space in report.spaces:
        check_range("space", space.space, 0, MAX_COUNT)
        check_range("total_bytes", space.total_bytes, 0, MAX_LENT_BYTES)
        check_range("free_bytes", space.free_bytes, 0, MAX_LENT_BYTES)
        check_range("unit_bytes", space.unit_bytes, 1, MAX_LENT_BYTES)
    for offer in report.offers:
        check_offer(offer.offer)
        check_range("leased_bytes", offer.leased_bytes, 0, MAX_LENT_BYTES)
    for lease in report.leases:
        _check_lease(lease)


def _check_lease(lease: LeaseReport) -> None:
    check_ids(lease_id=lease.lease_id, offer_id=lease.offer_id, consumer=lease.consumer)
    check_key("key", lease.key)
    check_token("token", lease.token)
    check_range("length_bytes", lease.length_bytes, 0, MAX_LENT_BYTES)
    check_range("remaining_ms", lease.remaining_ms, 0, MAX_DURATION_MS)
