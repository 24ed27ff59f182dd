"""An engine in the mempool's pages says with the first output of a request what it found in leased pages.

The scheduler, the block pool and the mempool's core are real; there is no model (tests/support/page_engine.py).
"""

import warnings

import pytest

pytest.importorskip("vllm")

from shared.ids import HandoffId

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what vLLM's schedulers import
    from tests.support.page_engine import SimEngine

from tests.support.page_world import World, hashes_of
from tests.unit.mempool_harness import BLOCK_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PROMPT = bytes(i % 3 for i in range(2 * BLOCK_TOKENS + BLOCK_TOKENS // 2))


class Decoder:
    """An engine that goes on with PROMPT, which another one has computed; `told` by each of its outputs."""

    def __init__(self, name: str, depth: int) -> None:
        self.world = World(name, 30)
        prefill, self.engine = (
            SimEngine(self.world, f"{role}-{name}", name, depth=depth) for role in ("p", "d")
        )
        client = self.world.client(self.engine.instance)
        self.world.pump()
        prefill.add("r", PROMPT, 1, {"handoff_id": HandoffId("h")})
        self.run(prefill)
        self.quire = self.world.acquired(client, hashes_of(PROMPT), HandoffId("h"))
        self.lease_id = self.quire["lease_id"]
        self.told: list[dict] = []
        update = self.engine.scheduler.update_from_output

        def heard(*args):
            outputs = update(*args)
            self.told += [o.kv_transfer_params for client in outputs.values() for o in client.outputs]
            return outputs

        self.engine.scheduler.update_from_output = heard
        self.engine.add("r", PROMPT, 4, self.quire)

    def run(self, engine: SimEngine, num_told: int | None = None) -> None:
        """Until it has nothing to do, or has so many outputs."""
        for _ in range(400):
            if (not engine.unfinished and not engine.steps) or (num_told and len(self.told) >= num_told):
                return
            engine.turn()
            self.world.pump()
            self.world.advance(10)
        raise AssertionError(engine.describe())

    @property
    def num_releases_unknown(self) -> int:
        self.world.pump()
        assert self.world.mempool is not None
        return self.world.mempool.pool.counters["releases_unknown"]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_leased_pages_held_is_told_with_the_first_output_and_once(depth):
    decoder = Decoder(f"told-{depth}", depth)
    decoder.run(decoder.engine)
    first, *between, last = decoder.told
    assert (first["blocks_local"], first["blocks_loaded"]) == (2, 1)
    assert (first["tokens_loaded"], first["bytes_loaded"] > 0) == (len(PROMPT) - 1, True)
    assert between == [None, None]
    assert "blocks_local" not in last


def test_a_request_that_is_stopped_has_told_all_and_its_lease_is_released_once():
    decoder = Decoder("stopped", 2)
    decoder.run(decoder.engine, num_told=1)
    decoder.engine.abort("r")
    assert decoder.told[0]["blocks_local"] == 2
    decoder.run(decoder.engine)
    assert decoder.engine.scheduler.holds_lease(decoder.lease_id), "its front leaves the lease to it"
    assert not decoder.engine.scheduler.leases
    assert decoder.num_releases_unknown == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_leases_pin_is_in_use_until_its_request_is_over(depth):
    decoder = Decoder(f"used-{depth}", depth)
    pages = decoder.engine.scheduler.pages
    decoder.run(decoder.engine, num_told=1)
    assert pages.num_in_use() == 4, "the prompt's three, and the copy of its last block"
    own = round(pages.get_usage() * pages.num_owned)
    assert own == 1, "the share is of its own pages"
    decoder.run(decoder.engine)
    assert pages.num_in_use() == 0
