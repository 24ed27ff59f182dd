"""The error tree. `code` is stable and appears unchanged in logs, metrics and HTTP bodies.

    ClusterError(code, retryable, http_status)
    ├─ RequestError        the caller's fault
    │  ├─ InvalidRequest   400  malformed or out of range
    │  ├─ PromptTooLong    400  context_length_exceeded
    │  ├─ BodyTooLarge     413
    │  ├─ Unauthorized     401  invalid_api_key
    │  ├─ ModelNotFound    404  model_not_found
    │  ├─ NotHeld          409  a page address that the caller holds no page or pin of
    │  └─ Overloaded       503  shed, with Retry-After
    ├─ PeerError           another process
    │  ├─ PeerTimeout      504
    │  ├─ PeerGone         503; draining: in good order
    │  ├─ InstanceUnknown  503  no mempool that is reached from here serves it
    │  ├─ NoReceiver       503  nobody of the target instance would take what is delivered
    │  ├─ CopyFailed       503  pages did not arrive
    │  └─ PeerProtocolError 502
    ├─ ResourceError
    │  ├─ OutOfPages       503
    │  ├─ LeaseExpired     503
    │  └─ StaleEpoch       503
    ├─ SettingsError       a setting is wrong; the message names the key and a working value
    └─ InvariantBroken     500  our bug: dump state and exit; nobody catches it

An expected refusal is a return value (`Placed | Rejected`); exceptions are for the rest.
"""


class ClusterError(Exception):
    """Root of every error that Quire raises on purpose."""

    code = "cluster.error"
    retryable = False
    http_status = 500

    def __init__(self, message: str, *, retry_after_ms: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.param = param  # name of the request field at fault, for OpenAI's error body


class RequestError(ClusterError):
    """The caller's fault; repeating the same request cannot help, unless `retryable`."""

    code = "invalid_request"
    http_status = 400


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range."""


class PromptTooLong(RequestError):
    """Prompt plus requested output exceed the model's context."""

    code = "context_length_exceeded"


class BodyTooLarge(RequestError):
    """The HTTP body exceeds the stated limit."""

    code = "body_too_large"
    http_status = 413


class Unauthorized(RequestError):
    """API keys are set and the request carries none that is known."""

    code = "invalid_api_key"
    http_status = 401


class ModelNotFound(RequestError):
    """No instance serves the named model."""

    code = "model_not_found"
    http_status = 404


class NotHeld(RequestError):
    """A page address that its caller neither allocated nor pinned."""

    code = "address.not_held"
    http_status = 409


class Overloaded(RequestError):
    """Shed: no instance can take the request now."""

    code = "overloaded"
    retryable = True
    http_status = 503


class PeerError(ClusterError):
    """Another process failed us."""

    code = "peer.error"
    retryable = True
    http_status = 503


class PeerTimeout(PeerError):
    """No answer before the deadline."""

    code = "peer.timeout"
    http_status = 504


class PeerGone(PeerError):
    """The connection to the process ended."""

    code = "peer.gone"


class Draining(PeerGone):
    """The process shuts down in good order."""

    code = "draining"


class InstanceUnknown(PeerError):
    """No mempool that is reached from here serves the named instance."""

    code = "instance.unknown"


class NoReceiver(PeerError):
    """Nobody of the target instance is connected that would take the pages or the private data."""

    code = "receiver.none"


class CopyFailed(PeerError):
    """Pages did not arrive; nothing was inserted."""

    code = "copy.failed"


class PeerProtocolError(PeerError):
    """The process sent what it cannot have meant."""

    code = "peer.protocol"
    retryable = False
    http_status = 502


class ResourceError(ClusterError):
    """Something finite ran out or moved on."""

    code = "resource.error"
    retryable = True
    http_status = 503


class OutOfPages(ResourceError):
    """The mempool cannot grant what was asked."""

    code = "pages.exhausted"


class LeaseExpired(ResourceError):
    """The lease ended before its holder used it."""

    code = "lease.expired"


class StaleEpoch(ResourceError):
    """The caller holds an older epoch than the owner."""

    code = "epoch.stale"


class SettingsError(ClusterError):
    """A setting is unknown or wrong."""

    code = "settings.invalid"


class InvariantBroken(ClusterError):
    """Our bug. Nobody catches this: the process logs its state and exits."""

    code = "invariant.broken"
