"""What a peer says of its NIXL agent: refused when it was damaged or is of another version, before UCX sees it."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from shared.errors import PeerProtocolError
from shared.transfer import nixl
from shared.transfer.describe import EndDescription, encode
from shared.transfer.errors import PathUnavailable
from shared.transfer.interface import Peer
from shared.transfer.nixl import NixlEnd

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "nixl 1.5.1"
SAID = NixlEnd("reader.0", bytes(range(200)), {"0.0": (1 << 40, -1)}, LIBRARY).sealed()


class TakenToNixl(Exception):
    pass


def taken(metadata):
    raise TakenToNixl


class Agent:
    """NixlAgent, which takes no metadata but says that it was asked."""

    library = LIBRARY

    def __init__(self, instance):
        self.name = instance
        self.add_peer = taken

    def progress(self):
        pass

    def close(self):
        return True


@pytest.fixture
def connect(monkeypatch):
    """A function that connects to who sent these bytes for NIXL."""
    monkeypatch.setattr(nixl, "NixlAgent", Agent)
    transport = nixl.NixlTransport("source")
    yield lambda payload: transport.connect(
        Peer(encode(EndDescription(instance="reader", boot_id="", payloads={"nixl": payload})))
    )
    transport.close()


def test_a_description_with_any_one_byte_wrong_never_brings_other_metadata_to_nixl(connect):
    payload = msgspec.msgpack.encode(SAID)
    with pytest.raises(TakenToNixl):
        connect(payload)
    for at in range(len(payload)):
        for wrong in (0, 11, payload[at] ^ 1, payload[at] ^ 0x80):
            damaged = payload[:at] + bytes((wrong,)) + payload[at + 1 :]
            try:
                connect(damaged)
            except PeerProtocolError:
                continue
            except TakenToNixl:  # a name of one of its fields is damaged, which is then one that nobody knows
                found = msgspec.msgpack.decode(damaged, type=NixlEnd)
                assert (found.metadata, found.regions) == (SAID.metadata, SAID.regions)


def test_metadata_of_another_version_of_nixl_is_refused_and_says_so(connect):
    other = msgspec.structs.replace(SAID, library="nixl 9.9.9").sealed()
    with pytest.raises(PathUnavailable, match=r"reader.0 has nixl 9.9.9, this end nixl 1.5.1"):
        connect(msgspec.msgpack.encode(other))


def test_an_end_of_before_digests_is_taken_as_it_is(connect):
    old = {"agent": SAID.agent, "metadata": SAID.metadata, "regions": SAID.regions}
    with pytest.raises(TakenToNixl):
        connect(msgspec.msgpack.encode(old))
    msgspec.msgpack.decode(  # and that one reads what this one says
        msgspec.msgpack.encode(SAID),
        type=msgspec.defstruct(
            "Old", [("agent", str), ("metadata", bytes), ("regions", dict[str, tuple[int, int]])]
        ),
    )


DAMAGES = """
    import msgspec, numpy as np
    from shared.transfer.config import TransferSettings, apply_ucx_environment
    apply_ucx_environment(TransferSettings())
    from shared.errors import PeerProtocolError
    from shared.transfer.describe import decode, encode
    from shared.transfer.interface import Peer, Region, RegionKind
    from shared.transfer.nixl import NixlEnd, NixlTransport

    memory = np.zeros(1 << 20, np.uint8)
    source, reader = NixlTransport("source"), NixlTransport("reader")
    for end in (source, reader):
        end.register(Region("0.0", RegionKind.HOST, memory.ctypes.data, 1 << 16, 16, "k"))
    end = decode(reader.describe())
    payload = end.payloads["nixl"]
    at = payload.index(b"UCX|c") + 13  # where the version of UCX's address is
    damaged = payload[:at] + bytes((11,)) + payload[at + 1 :]
    try:
        source.connect(Peer(encode(msgspec.structs.replace(end, payloads={"nixl": damaged}))))
    except PeerProtocolError as error:
        print("refused:", error.message)
    source.connect(Peer(encode(end)))
    print("connected")
    source.close(), reader.close()
"""


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
def test_an_address_that_ucx_would_die_of_is_refused_and_the_next_one_is_taken():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DAMAGES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    refused, connected = done.stdout.splitlines()[-2:]
    assert refused.startswith("refused: ")
    assert "damaged on its way" in refused
    assert connected == "connected"
