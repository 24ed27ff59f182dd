"""A request that NIXL fails halfway while it begins: what runs of it is in doubt until NIXL gives the request back."""

from types import SimpleNamespace

import numpy as np
import pytest

from shared.transfer.errors import PeerLost, TransferFailed
from shared.transfer.nixl import ReadAttempt
from shared.transfer.nixl_agent import NixlAgent


class Gone(Exception):
    pass


class Request:
    """NIXL's handle."""

    def __init__(self) -> None:
        self.is_active = True

    def release(self) -> None:
        if self.is_active:
            raise RuntimeError("still active")


def failing(error: Exception) -> tuple[NixlAgent, Request]:
    """An agent whose request fails behind its first descriptor."""

    def transfer(_handle):
        raise error

    agent, request = NixlAgent.__new__(NixlAgent), Request()
    agent._agent = SimpleNamespace(
        get_xfer_descs=lambda *what: what, initialize_xfer=lambda *_: request, transfer=transfer
    )
    agent._errors = SimpleNamespace(nixlRemoteDisconnectError=Gone)
    return agent, request


def begin(agent: NixlAgent):
    one = np.array([8], np.uint64)
    return agent.begin(
        write=True, local=one, local_device=-1, remote=one, remote_device=-1, sizes=one, peer="p"
    )


def test_a_request_that_fails_as_it_begins_may_still_write_until_nixl_gives_it_back():
    agent, request = failing(RuntimeError("no more descriptors"))
    sending = begin(agent)
    with pytest.raises(TransferFailed, match="no more descriptors"):
        sending.poll()
    with pytest.raises(TransferFailed):
        sending.poll()
    assert not sending.over
    request.is_active = False
    with pytest.raises(TransferFailed):
        sending.poll()
    assert sending.over


def test_one_that_nixl_gives_back_at_once_was_never_begun():
    agent, request = failing(RuntimeError("no more descriptors"))
    request.is_active = False
    with pytest.raises(TransferFailed, match="no more descriptors"):
        begin(agent)


def test_one_that_fails_for_a_connection_that_is_gone_loses_its_link():
    agent, _ = failing(Gone())
    lost: list[str] = []
    attempt = ReadAttempt(SimpleNamespace(peer_lost=lost.append), begin(agent))
    with pytest.raises(PeerLost):
        attempt.poll()
    assert len(lost) == 1
    assert not attempt.cancel(peer_is_dead=False)
