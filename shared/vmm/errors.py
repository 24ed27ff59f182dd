"""What can go wrong with pages and windows; all of it is a ResourceError with a code of its own."""

from shared.errors import ResourceError


class VmmError(ResourceError):
    """The kernel or the driver refused a call."""

    code = "vmm.refused"


class VmmUnavailable(VmmError):
    """This machine has no such device, no driver, or no bindings for it."""

    code = "vmm.unavailable"
    retryable = False


class MapperTimeout(VmmError):
    """A background mapper has not done by the deadline what it was given. Nothing was refused: it may still do it."""

    code = "vmm.timeout"


class BadMapping(VmmError):
    """The caller asked for what cannot be: a taken index, an unmapped one, a page without memory."""

    code = "vmm.bad_mapping"
    retryable = False


class TooManyMappings(VmmError):
    """The process would come near vm.max_map_count; nothing was changed."""

    code = "vmm.mappings"
