"""Which path a pair of regions takes."""

import pytest

from shared.errors import PeerProtocolError
from shared.transfer.choose import Reach, choose
from shared.transfer.describe import EndDescription, RegionDescription, decode, encode
from shared.transfer.interface import PathName, RegionKind


def region(kind=RegionKind.HOST, key="k", uuid="", page_bytes=4096, name="r"):
    return RegionDescription(
        name=name, kind=kind, page_bytes=page_bytes, num_pages=8, memory_key=key, device_uuid=uuid
    )


def end(boot="b1", instance="i", regions=()):
    return EndDescription(instance=instance, boot_id=boot, regions=regions)


HOST = region(key="host")
MY_HOST = region(key="my host")
PAGES = region(RegionKind.CUDA_PAGES, "gpu0", "u0")
MY_PAGES = region(RegionKind.CUDA_PAGES, "my gpu1", "u1")
SLAB = region(RegionKind.CUDA_SLAB, "slab0", "u0")
MY_SLAB = region(RegionKind.CUDA_SLAB, "my slab1", "u1")
ALL = Reach(has_fds=True, in_nccl_pair=True, has_nixl=True, has_staging=True)


@pytest.mark.parametrize(
    ("source", "target", "reach", "one_host", "path"),
    [
        (HOST, HOST, Reach(), True, PathName.ALIAS),
        (PAGES, PAGES, Reach(), True, PathName.ALIAS),
        (HOST, MY_HOST, ALL, True, PathName.SHM),
        (PAGES, MY_PAGES, ALL, True, PathName.IMPORTED),
        (PAGES, MY_HOST, ALL, True, PathName.IMPORTED),
        (HOST, MY_PAGES, ALL, True, PathName.IMPORTED),
        (
            PAGES,
            MY_PAGES,
            Reach(has_fds=True, has_peer_access=False, has_staging=True),
            True,
            PathName.STAGED,
        ),
        (SLAB, MY_SLAB, Reach(has_fds=True, in_nccl_pair=True, has_nixl=True), True, PathName.NCCL),
        (SLAB, MY_SLAB, Reach(has_nixl=True), True, PathName.NIXL),
        (PAGES, MY_PAGES, Reach(has_nixl=True, has_staging=True), True, PathName.STAGED),
        (PAGES, MY_PAGES, Reach(in_nccl_pair=True), False, PathName.NCCL),
        (HOST, MY_HOST, ALL, False, PathName.NIXL),
        (SLAB, MY_HOST, Reach(has_nixl=True), False, PathName.NIXL),
        (PAGES, MY_PAGES, Reach(has_nixl=True, has_staging=True), False, None),
        (HOST, MY_HOST, Reach(has_fds=True, has_staging=True), False, None),
        (HOST, region(key="x", page_bytes=8192), ALL, True, None),
    ],
)
def test_the_path_is_the_fastest_that_both_ends_can_take(source, target, reach, one_host, path):
    found = choose(end(), end("b1" if one_host else "b2"), source, target, reach)
    assert found.path == path
    assert found.reason


def test_equal_keys_on_two_hosts_are_not_the_same_memory():
    assert choose(end("b1"), end("b2"), HOST, HOST, ALL).path is PathName.NIXL
    assert choose(end(""), end(""), HOST, HOST, ALL).path is PathName.NIXL


def test_a_missing_path_names_what_is_missing():
    reason = choose(end("b1"), end("b2"), PAGES, MY_HOST, Reach(has_nixl=True)).reason
    assert "cudaMalloc slab" in reason
    assert "NIXL at both ends" in choose(end("b1"), end("b2"), HOST, MY_HOST, Reach()).reason


def test_descriptions_cross_the_wire_and_others_are_refused():
    description = end(regions=(HOST, region(name="other")))
    assert decode(encode(description)) == description
    for raw in (
        b"",
        b"\xc1",
        encode(end(regions=(HOST, HOST))),
        encode(end(regions=(region(page_bytes=0),))),
        encode(EndDescription(instance="i", boot_id="b", version=2)),
        encode(description).replace(description.instance.encode(), b"\xff" * len(description.instance)),
        b"\0" * (5 << 20),
    ):
        with pytest.raises(PeerProtocolError):
            decode(raw)
