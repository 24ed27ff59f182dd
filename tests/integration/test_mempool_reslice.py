"""Spaces of unequal tensor or pipeline parallelism in one mempool: a reader gets blocks cut as its ranks need them."""

import os

import msgspec
import numpy as np
import pytest

from shared.ids import InstanceId
from shared.kv.layout import EngineDescription
from shared.kv.words import u32_list
from shared.mempool.page_quota import PageQuota, SealedPage
from shared.mempool.rank_memory import RankMemory
from tests.integration.mempool_rig import SEED, MempoolProcess, PatientClient, chain, until

LAYERS, HEADS, TOKENS, DIM = 6, 4, 16, 8
ABC = chain("a", "b", "c")


def described(tp_size: int, pp_size: int = 1) -> EngineDescription:
    heads, layers = HEADS // tp_size, LAYERS // pp_size
    return EngineDescription(
        model="m", fingerprint="f", dtype="float32", layout="layers-blocks", backend="none", tp_size=tp_size,
        num_layers=layers, num_kv_heads=heads, total_kv_heads=HEADS, order="HND", head_dim=DIM,
        block_tokens=TOKENS, block_bytes=layers * heads * TOKENS * 2 * DIM * 4, pp_size=pp_size,
        total_layers=LAYERS if pp_size > 1 else 0,
    )  # fmt: skip


def block(number: int) -> np.ndarray:
    """[layers, heads, tokens, K and V] of the whole model: every value is another."""
    shape = (LAYERS, HEADS, TOKENS, 2 * DIM)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1_000_000 * number


class Instance:
    """Ranks that share a process here, and their engine."""

    def __init__(self, socket, name: str, tp_size: int, pp_size: int = 1) -> None:
        self.name, self.tp_size = name, tp_size
        self.description = described(tp_size, pp_size)
        self.ranks = [
            RankMemory(socket, InstanceId(name), self.description, rank, device=f"cpu:{name}")
            for rank in range(self.description.num_ranks)
        ]
        self.quota = PageQuota(socket, InstanceId(name), self.description, 4)
        self.header = self.quota.attach()
        self.stock: list = []

    def _part(self, rank: int) -> tuple[slice, slice]:
        """Layers and heads of the rank."""
        layers, heads = self.description.num_layers, self.description.num_kv_heads
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        return slice(pp_rank * layers, (pp_rank + 1) * layers), slice(tp_rank * heads, (tp_rank + 1) * heads)

    def _at(self, rank: int, page: int) -> int:
        return self.ranks[rank].offset_bytes + page * self.header.page_bytes

    def save(self, hashes) -> None:
        until(lambda: self.stock.extend(self.quota.take_granted()) or len(self.stock) >= len(hashes), "pages")
        parent, sealed = SEED, []
        for number, block_hash in enumerate(hashes):
            page, epoch = self.stock.pop()
            self.quota.writing([(page, epoch)])
            self.write(page, block(number))
            sealed.append(SealedPage(page, epoch, block_hash, parent, TOKENS))
            parent = block_hash
        self.quota.seal(sealed)

    def write(self, page: int, whole: np.ndarray) -> None:
        for rank, memory in enumerate(self.ranks):
            mine = np.ascontiguousarray(whole[self._part(rank)])
            os.pwrite(memory.fd, mine.tobytes(), self._at(rank, page))

    def read(self, page: int) -> np.ndarray:
        whole = np.full((LAYERS, HEADS, TOKENS, 2 * DIM), -1, np.float32)
        for rank, memory in enumerate(self.ranks):
            raw = os.pread(memory.fd, self.description.block_bytes, self._at(rank, page))
            part = whole[self._part(rank)]
            part[:] = np.frombuffer(raw, np.float32).reshape(part.shape)
        return whole

    def close(self) -> None:
        self.quota.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def mempool(tmp_path):
    process = MempoolProcess(tmp_path)
    yield process
    process.stop()


# (tensor ranks, pipeline ranks)
ENDS = [
    ((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (4, 1)), ((4, 1), (2, 1)), ((4, 1), (1, 1)),
    ((1, 1), (1, 2)), ((1, 2), (1, 1)), ((2, 1), (1, 2)), ((1, 2), (2, 2)), ((1, 2), (1, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), ENDS)
async def test_blocks_arrive_cut_over_the_readers_ranks(mempool, source, target):
    prefill, decode = Instance(mempool.socket, "p", *source), Instance(mempool.socket, "d", *target)
    client = PatientClient(mempool.socket, InstanceId("d"))
    client.start()
    try:
        prefill.save(ABC)
        assert await client.wait_connected(30_000)
        assert await client.match(ABC) == 3
        got = await client.acquire(ABC, timeout_ms=30_000)
        assert got.num_blocks == 3, mempool.status()
        for number, page in enumerate(u32_list(got.pages)):
            np.testing.assert_array_equal(decode.read(page), block(number))
    finally:
        await client.close()
        prefill.close()
        decode.close()


def test_pipeline_ranks_of_unequal_or_unknown_layers_are_no_family():
    whole, halves = described(1), described(1, 2)
    assert whole.family_key == halves.family_key == described(2, 3).family_key
    unknown = msgspec.structs.replace(halves, total_layers=0)
    uneven = msgspec.structs.replace(halves, total_layers=LAYERS + 1)
    assert {unknown.family_key, uneven.family_key} == {halves.content_key}


async def test_another_models_blocks_are_no_family(mempool):
    prefill, decode = Instance(mempool.socket, "p", 2), Instance(mempool.socket, "d", 1)
    other = msgspec.structs.replace(described(1), fingerprint="g")
    assert described(1).family_key == described(2).family_key != other.family_key
    assert described(1).content_key != described(2).content_key
    apart = RankMemory(mempool.socket, InstanceId("x"), other, 0, device="cpu:x")
    client = PatientClient(mempool.socket, InstanceId("x"))
    client.start()
    try:
        prefill.save(ABC)
        assert await client.wait_connected(30_000)
        assert await client.match(ABC) == 0
    finally:
        await client.close()
        apart.close()
        prefill.close()
        decode.close()
