"""A real mempool whose memory the kernel refuses to make: who attaches is refused, and nobody else loses anything."""

import os
import resource
import time

from shared.ids import InstanceId
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire
from tests.integration.mempool_rig import DESCRIPTION, PATIENCE_MS, MempoolProcess, until

PAGES = 1 << 20  # of a memfd larger than it may make: ftruncate fails, as mmap does where memory is short


def attach(pool, instance, device="cpu"):
    link = BlockingUnixLink(
        pool.socket, out=wire.TO_MEMPOOL, into=wire.FROM_MEMPOOL, on_message=lambda *_: None
    )
    link.connect(PATIENCE_MS)
    message = wire.Attach(
        kind="engine", instance=InstanceId(instance), description=DESCRIPTION, quota_pages=4, device=device
    )
    reply, _, fds = link.call(message, timeout_ms=PATIENCE_MS)
    close_fds(fds)
    return link, reply, len(fds)


def num_open(pid):
    """Descriptors, once their number stays: what an attachment opens for a moment does not count."""
    before, now = -1, 0
    while before != now:
        before, now = now, len(os.listdir(f"/proc/{pid}/fd"))
        time.sleep(0.2)
    return now


def test_an_engine_whose_memory_cannot_be_made_is_refused_and_the_others_keep_theirs(tmp_path):
    pool = MempoolProcess(tmp_path, **{"capacity-bytes": 64 * 8192})
    try:
        one, reply, num_fds = attach(pool, "e1", "cpu:0")
        assert (type(reply), num_fds) == (wire.Attached, 2)
        used = num_open(pool.process.pid)
        _, most = resource.prlimit(pool.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pool.process.pid, resource.RLIMIT_FSIZE, (64 * 8192 - 1, most))
        for _ in range(3):
            two, reply, num_fds = attach(pool, "e2", "cpu:1")
            assert (type(reply), num_fds) == (wire.AttachRefused, 0)
            assert reply.code == "pages.exhausted"
            assert "File too large" in reply.reason
            two.close()
        until(lambda: num_open(pool.process.pid) <= used, "nothing of it is open")
        again, reply, num_fds = attach(pool, "e3", "cpu:0")  # whose memory is there
        assert (type(reply), num_fds) == (wire.Attached, 2)
        resource.prlimit(pool.process.pid, resource.RLIMIT_FSIZE, (most, most))
        two, reply, num_fds = attach(pool, "e2", "cpu:1")
        assert (type(reply), num_fds) == (wire.Attached, 2), "nothing was decided about it before"
        for link in (one, two, again):
            link.close()
        assert pool.process.poll() is None
    finally:
        pool.stop()
