"""Pages of one space in which blocks of another lie, on loan: a space without memory of its own. No I/O.

Page i here is page i of the producer. Its index finds the consumer's blocks, its table knows which of the lent pages
holds what. Nobody outside reads that table, and a successor of this mempool begins without it: loans end with the
mempool.
"""

from services.mempool.core.actions import Action, PoolLimits
from services.mempool.core.engines import Engines
from services.mempool.core.entry import Entry
from services.mempool.core.leases import Fence
from services.mempool.core.page_table import PageTable
from services.mempool.core.pool import Pool
from services.mempool.core.space import LOAN_LABEL, Memory
from shared.ids import Epoch
from shared.kv.page_fit import misfit


class LoanPool(Pool):
    """`producer`, `consumer`: the two spaces. Nobody attaches here."""

    def __init__(
        self,
        limits: PoolLimits,
        boot_generation: Epoch,
        number: int,
        fence: Fence,
        producer: Pool,
        consumer: Pool,
    ) -> None:
        super().__init__(limits, boot_generation, number, fence)
        lender, borrower = producer.memory, consumer.memory
        assert lender is not None
        assert borrower is not None
        self.producer, self.consumer = producer, consumer
        table = PageTable(lender.table.num_pages, boot_generation)
        self.memory = Memory(
            borrower.content_key, borrower.family_key, borrower.block_tokens, borrower.page_bytes,
            table, Engines(table, 0.0, 0.0, self.index), lender.pages_per_slab,
            label=LOAN_LABEL, num_ranks=borrower.num_ranks,
        )  # fmt: skip
        self.readers.epochs = table.epochs

    def note(self, *entries: Entry) -> None:
        """No successor asks."""

    def tick(self, now_ms: int) -> list[Action]:
        """No memory is its own to give back."""
        return self._done()

    def next_deadline_ms(self) -> int | None:
        """Nothing is due here: lending.py watches its loans."""
        return None

    def _done(self) -> list[Action]:
        sends, self._sends = self._sends, []
        assert self.memory is not None
        self.memory.table.take_words()
        return sends


def may_lend(producer: Pool, consumer: Pool) -> bool:
    """Whether a page of the one has room for a block of the other, on as many ranks."""
    return not why_not(producer, consumer)


def why_not(producer: Pool, consumer: Pool) -> str:
    """In words about the producer; "": it may lend to the consumer."""
    lender, borrower = producer.memory, consumer.memory
    if lender is None or borrower is None or producer is consumer or lender.is_behind or borrower.is_behind:
        return "they are not two spaces of engines"
    return misfit(
        lender=(lender.num_ranks, lender.page_bytes), borrower=(borrower.num_ranks, borrower.page_bytes)
    )
