"""Blocks of a running request that live outside its engine's memory, where attention reads them in place.

An engine has *far places* behind its own pages: block ids under which its ranks map, read-only, pages of host memory or
pages that another space lends. The engine names sealed blocks; the mempool copies them out, has every rank map the
copies, and says where; only then does the engine write the new block ids into its block table and unpin its own pages.
A place stays what it is until the engine says FarDrop, or is proven dead. docs/decisions/0022.
"""

from msgspec import Struct

NO_PLACE = 0xFFFFFFFF


class FarOut(Struct, frozen=True, kw_only=True, tag="far_out"):
    """From an engine: map copies of these sealed blocks, which it goes on pinning, at far places of its ranks."""

    number: int  # the engine's, new each time
    hashes: bytes  # 32 B each


class FarPlaced(Struct, frozen=True, kw_only=True, tag="far_placed"):
    """Answer to FarOut, once: of each hash its place, or NO_PLACE."""

    number: int
    places: bytes  # u32 each
    blocks_peer: int = 0  # of those that are placed, in lent pages; the others are in host memory


class FarMoved(Struct, frozen=True, kw_only=True, tag="far_moved"):
    """To an engine: these places are wanted back, and their bytes are at other places too, or nowhere (NO_PLACE).

    Said once of a place. FarDrop of the old ones shall follow as soon as no step reads them: at the lender's deadline
    the engine's processes are killed.
    """

    places: bytes  # u32 each
    to: bytes  # u32 each


class FarDrop(Struct, frozen=True, kw_only=True, tag="far_drop"):
    """From an engine: no step, begun or to come, reads these places. Unknown ones are ignored."""

    places: bytes  # u32 each


class MapFar(Struct, frozen=True, kw_only=True, tag="map_far"):
    """To a rank: map pages at these places, read-only, then say FarMapped.

    Of host memory one descriptor comes with it, and `offsets` in it; of a GPU's, a descriptor of each page. Where
    pages share slabs, a descriptor of each slab in the order in which they are first named, and offsets in the slabs.
    """

    number: int  # the mempool's
    places: bytes  # u32 each
    offsets: bytes = b""  # u64 each
    slabs: bytes = b""  # u32 each: of the memory, of which each place's page is a part
    slab_bytes: int = 0
    memory_id: int = 0  # of the memory whose slabs these are, across its mempools


class UnmapFar(Struct, frozen=True, kw_only=True, tag="unmap_far"):
    """To a rank: nobody's step reads these places. Unmap them, then say FarMapped."""

    number: int
    places: bytes


class FarMapped(Struct, frozen=True, kw_only=True, tag="far_mapped"):
    """A rank's answer to MapFar and UnmapFar. One that is not ok has left nothing changed."""

    number: int
    is_ok: bool = True
