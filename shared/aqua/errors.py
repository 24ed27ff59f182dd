"""What can go wrong with tensors away from their device; the rest is what mempool and coordinator say."""

from shared.errors import RequestError, ResourceError


class TensorLost(ResourceError):
    """The bytes are gone: their copy into host memory failed while their lender took its pages back."""

    code = "tensor.lost"
    retryable = False


class AquaClosed(RequestError):
    """Used after close()."""

    code = "aqua.closed"
