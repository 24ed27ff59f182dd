"""What has come from another host is compared with what its source has: the part of checks.py between two mempools.

    reader --CheckEpochs--> source: sums the pages of the sample again, and says what they are
    source --EpochsChecked, checksums--> reader: sums what has come; what differs counts as stale

A page whose sum the source finds changed is stale too. The number of a page's sum is its position in CheckEpochs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from services.mempool.checks import Checks
from services.mempool.core.mempool import Mempool
from services.mempool.page_sums import Piece
from shared.kv.words import u32_bytes, u32_list, u64_list
from shared.observe.log import get_logger
from shared.wire.mempool_peer import CheckEpochs, EpochsChecked

MAX_ASKED = (
    4_096  # questions of readers that the core has not answered; further ones are answered without sums
)

log = get_logger("mempool.checks")


@dataclass(frozen=True, slots=True)
class _Question:
    space: int
    pages: Sequence[int]
    epochs: Sequence[int]


class RemoteChecks:
    """Of one mempool, on its loop."""

    def __init__(self, checks: Checks, core: Mempool) -> None:
        self._checks, self._core = checks, core
        self._asked: dict[tuple[int, int], _Question] = {}  # by link and call

    # -- the source -----------------------------------------------------------------------------------

    def asked(self, link: int, call: CheckEpochs) -> None:
        """A reader's question is on its way to the core."""
        if call.held or len(self._asked) >= MAX_ASKED:
            return
        try:
            question = _Question(call.space, u32_list(call.pages), u64_list(call.epochs))
        except ValueError:
            return  # the core refuses it
        self._asked[link, call.call_id] = question

    def answering(self, link: int, answer: EpochsChecked, tell: Callable[[EpochsChecked], None]) -> bool:
        """The core has answered. Whether `tell` is called later, with sums; False: there are none."""
        question = self._asked.pop((link, answer.call_id), None)
        if question is None:
            return False
        looks = self._checks.of_pages(question.space, question.pages, question.epochs)
        if not looks:
            return False

        def looked(wrong: int | None) -> None:
            good = {
                i: known.value for i, known in looks.items() if known.value and (wrong is None or i < wrong)
            }
            stale = answer.stale + (u32_bytes([wrong]) if wrong is not None else b"")
            sums = u32_bytes(number for pair in good.items() for number in pair)
            tell(EpochsChecked(call_id=answer.call_id, stale=stale, checksums=sums))

        self._checks.look(looks, looked)
        return True

    def forget(self, link: int) -> None:
        """The connection ended."""
        for key in [key for key in self._asked if key[0] == link]:
            del self._asked[key]

    # -- the reader -----------------------------------------------------------------------------------

    def arrived(self, address: str, answer: EpochsChecked, then: Callable[[EpochsChecked], None]) -> bool:
        """The source has answered. Whether `then` is called later, with what is wrong among the stale; False: nothing
        is to be compared."""
        space, pages = self._core.remote.arriving(answer.call_id, address)
        if not (answer.checksums and pages and self._checks.is_on):
            return False
        try:
            numbers = u32_list(answer.checksums)
            sums = dict(zip(numbers[::2], numbers[1::2], strict=True))
        except ValueError:
            sums = {len(pages): 0}
        if any(position >= len(pages) for position in sums):
            log.warning("checksums_malformed", address=address)
            then(msgspec.structs.replace(answer, stale=u32_bytes([0])))  # nothing of it is taken
            return True
        num_bytes = self._checks.block_bytes_of(space)
        pieces = [Piece(space, pages[position], num_bytes) for position in sums]

        def compare(values: list[int]) -> None:
            if not self._core.remote.arriving(answer.call_id, address)[
                1
            ]:  # given up: the pages may be others'
                then(answer)
                return
            pairs = zip(sums.items(), values, strict=True)
            wrong = [position for (position, value), found in pairs if value != found]
            self._checks.counters["checks_pages_checked"] += len(values)
            if wrong:
                self._checks.counters["checks_copies_wrong"] += 1
                log.error("copy_wrong", source=address, space=space, num_pages=len(wrong))
            then(msgspec.structs.replace(answer, stale=answer.stale + u32_bytes(wrong)))

        self._checks.sums(pieces, compare)
        return True
