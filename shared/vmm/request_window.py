"""Windows over a pool's pages for an engine with request slots: commands become calls, a thread makes them.

A pool's page is `num_pieces` pages of the source, behind each other (request_layout.py); one more, `null_piece`, is
private memory of this process that stands for all of a null page.
"""

from collections.abc import Sequence

from shared.vmm.interface import Op, PageSource, PageWindow
from shared.vmm.mapper import Mapper, open_mapper
from shared.vmm.request_layout import NULL_PLACES, RequestLayout
from shared.vmm.slot_commands import Command, Map


def map_blocks(window: PageWindow, num_pages: int, num_pieces: int, null_piece: int) -> None:
    """Block 0 is the null page, page p block p + 1: mapped once and for good, writable.

    Raises: BadMapping unless the window has (num_pages + 1) * num_pieces empty places; VmmError.
    Cost: one map call a piece, one call for access to all.
    """
    window.map_pages(0, [null_piece] * num_pieces)
    window.map(num_pieces, 0, num_pages * num_pieces)


class RequestWindow:
    """Places into which pages are mapped for reading only. A hole faults.

    Args:
        null_piece: mapped at the window's first place, where torch looks, and at the guards; None: private memory.
        guard_places: last places of each slot that are never holes: kernels may load (and mask) what is there.
    Raises: BadMapping, VmmError.
    """

    def __init__(
        self,
        source: PageSource,
        layout: RequestLayout,
        null_piece: int | None = None,
        guard_places: int = 0,
        *,
        native: bool = True,
    ) -> None:
        self.layout = layout
        self.window = source.window(layout.num_indices)
        if null_piece is None:
            self.window.map_private(0, NULL_PLACES)
        else:
            self.window.map_pages(0, [null_piece] * NULL_PLACES, writable=False)
            self._guard(null_piece, guard_places)
        self._mapper: Mapper = open_mapper(self.window, native=native)

    def _guard(self, null_piece: int, num_places: int) -> None:
        layout = self.layout
        for piece in range(layout.num_pieces if num_places else 0):
            for slot in range(layout.num_slots):
                end = layout.index(piece, (slot + 1) * layout.slot_places)
                self.window.map_pages(end - num_places, [null_piece] * num_places, writable=False)

    def submit(self, commands: Sequence[Command]) -> int:
        """Have them executed in order by the mapper's thread. Returns: the ticket to wait for.

        Raises: VmmError when an earlier one was refused: the window is not what the table says, end the process;
            BadMapping, TooManyMappings.
        """
        ops: list[Op] = []
        layout = self.layout
        for command in commands:
            for piece in range(layout.num_pieces):
                at = layout.index(piece, command.first)
                if isinstance(command, Map):
                    pages = [page * layout.num_pieces + piece for page in command.pages]
                    ops += self.window.plan_map(at, pages, writable=command.writable)
                else:
                    ops += self.window.plan_unmap(at, command.num_places)
        return self._mapper.submit(ops) if ops else self._mapper.submitted

    def is_done(self, ticket: int) -> bool:
        """Whether wait() would return at once."""
        return self._mapper.done >= ticket

    def wait(self, ticket: int) -> None:
        """Raises: VmmError when a command was refused or takes too long."""
        self._mapper.wait(ticket)

    def close(self) -> None:
        """Stop the thread and give the addresses back; nothing may touch the window any more."""
        self._mapper.close()
        self.window.close()
