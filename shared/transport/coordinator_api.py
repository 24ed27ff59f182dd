"""One connection pool to the coordinator, or to several of which one leads."""

from typing import TypeVar

import httpx
import msgspec

from shared.errors import PeerError, PeerGone, PeerProtocolError, PeerTimeout
from shared.wire.codec import MALFORMED

REQUEST_TIMEOUT_S = 1.0
MAX_REPLY_BYTES = 8 << 20
STANDBY = "market.standby"  # code of a coordinator that stands by

T = TypeVar("T")


class MustRegister(PeerError):
    """The coordinator does not know this member under its epoch (404, 409)."""


class _Refusal(msgspec.Struct, frozen=True, kw_only=True):
    code: str = ""
    leader: str = ""


class CoordinatorApi:
    """Calls with one deadline each.

    Args: url: of the coordinator; several, separated by commas, when others stand by: a call that meets a
    silent one or a standby fails, and the next call goes to the leader that it named, else to the next in the
    list.
    """

    def __init__(self, url: str, key: str) -> None:
        self._urls = [one.strip().rstrip("/") for one in url.split(",")]
        self._current = 0
        self._http = httpx.AsyncClient(
            headers={"x-api-key": key} if key else {}, timeout=REQUEST_TIMEOUT_S, trust_env=False
        )

    @property
    def url(self) -> str:
        """The one that the next call goes to."""
        return self._urls[self._current]

    async def ask(self, method: str, path: str, reply: type[T], body: msgspec.Struct | None = None) -> T:
        """Raises: PeerGone, PeerTimeout, PeerProtocolError, MustRegister."""
        response = await self.send(method, path, body)
        return decode(response, reply, f"{method} {path}")

    async def send(self, method: str, path: str, body: msgspec.Struct | None = None) -> httpx.Response:
        """A reply of status 2xx. Raises: as ask()."""
        response = await self.request(method, path, body)
        if response.status_code in (404, 409):
            raise MustRegister(response.text[:200])
        if not response.is_success:
            raise PeerProtocolError(f"{method} {path}: {response.status_code} {response.text[:200]}")
        return response

    async def request(
        self, method: str, path: str, body: msgspec.Struct | None = None, *, idempotency_key: str = ""
    ) -> httpx.Response:
        """A reply of any status, of a coordinator that does not stand by. Raises: PeerGone, PeerTimeout."""
        headers = {"content-type": "application/json"}
        if idempotency_key:
            headers["idempotency-key"] = idempotency_key
        content = msgspec.json.encode(body) if body is not None else None
        used = self._current
        try:
            response = await self._http.request(
                method, self._urls[used] + path, content=content, headers=headers
            )
        except httpx.TimeoutException as error:
            self._turn(used)
            raise PeerTimeout(f"the coordinator did not answer {method} {path}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._turn(used)
            raise PeerGone(f"{type(error).__name__}: {error}") from error
        if response.status_code == 503 and len(self._urls) > 1:
            self._leave_standby(response, used)
        return response

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _turn(self, used: int) -> None:
        """Once for all calls that fail there: of two at once the second would turn back."""
        if self._current == used:
            self._current = (used + 1) % len(self._urls)

    def _leave_standby(self, response: httpx.Response, used: int) -> None:
        try:
            refusal = msgspec.json.decode(response.content, type=_Refusal)
        except MALFORMED:
            return
        if refusal.code != STANDBY:
            return
        if refusal.leader in self._urls:  # never to an address that no setting gave
            self._current = self._urls.index(refusal.leader)
        else:
            self._turn(used)
        raise PeerGone(f"that coordinator stands by; {refusal.leader or 'nobody'} leads")


def decode(response: httpx.Response, reply: type[T], what: str) -> T:
    """The body. Raises: PeerProtocolError when it is too long or something else."""
    if len(response.content) > MAX_REPLY_BYTES:
        raise PeerProtocolError(f"{len(response.content)} bytes from the coordinator")
    try:
        return msgspec.json.decode(response.content, type=reply)
    except MALFORMED as error:
        raise PeerProtocolError(f"{what}: {error}") from error
