"""Memory of a GPU that goes back to the system and comes again: what ranks hear and say (shared/wire/mempool.py)."""

from msgspec import Struct


class Unmap(Struct, frozen=True, kw_only=True, tag="unmap"):
    """To a rank: nobody's step touches these slabs, begun or to come. Unmap them, then say Unmapped."""

    slabs: bytes  # u32 each


class Unmapped(Struct, frozen=True, kw_only=True, tag="unmapped"):
    """This process maps these slabs no more."""

    slabs: bytes


class MapSlabs(Struct, frozen=True, kw_only=True, tag="map_slabs"):
    """To a rank: these slabs have memory again; a descriptor of each comes with it. Map them, then say Mapped."""

    slabs: bytes


class Mapped(Struct, frozen=True, kw_only=True, tag="mapped"):
    """These slabs are mapped. The first one, with none named: all that there were; from then on it may be told."""

    slabs: bytes = b""
