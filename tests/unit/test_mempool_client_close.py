"""A client of the mempool that closes by itself has lost nothing."""

from structlog.testing import capture_logs

from shared.ids import InstanceId
from shared.mempool.client import MempoolClient


async def test_only_a_connection_that_the_mempool_ended_is_logged_as_lost(tmp_path, monkeypatch):
    client = MempoolClient(tmp_path / "pool.sock", InstanceId("i"))
    monkeypatch.setattr(client._link, "close", lambda: client._on_down(None))  # as a live link does
    client._up.set()
    with capture_logs() as said:
        await client.close()
    assert (said, client.counters["losses"], client.connected) == ([], 0, False)
    client._up.set()
    with capture_logs() as said:
        client._on_down(None)
    assert ([each["event"] for each in said], client.counters["losses"]) == (["mempool_lost"], 1)
