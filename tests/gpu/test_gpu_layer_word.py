"""A GPU says that a layer is written in the order of its stream: behind the kernels, and without anybody asking."""

import os
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from services.mempool.mover_layers import LayerMemory  # noqa: E402
from shared.engine.layer_progress import DeviceWord, LayerProgress  # noqa: E402
from shared.kv.layer_words import ALL_LAYERS  # noqa: E402

SLEEP_CYCLES = 200_000_000  # about 0.1 s


class Implementation:
    def forward(self):
        torch.cuda._sleep(SLEEP_CYCLES)


@pytest.fixture
def rank():
    memory = LayerMemory()
    fd = memory.take_fd()
    word = DeviceWord(os.dup(fd), torch.device("cuda:0"))
    os.close(fd)
    torch.cuda.synchronize()
    return memory, word


def test_a_layer_is_written_only_when_the_stream_got_there(rank):
    memory, word = rank
    layers = [Implementation() for _ in range(3)]
    progress = LayerProgress(word)
    progress.follow(layers)
    progress.begin(5)
    begun_s = time.monotonic()
    for layer in layers:
        layer.forward()
    progress.end()
    launched_s = time.monotonic() - begun_s
    seen = [memory.written(5)]
    while memory.written(5) < len(layers) and time.monotonic() - begun_s < 10:
        if memory.written(5) != seen[-1]:
            seen.append(memory.written(5))
    assert seen[0] == 0
    assert launched_s < time.monotonic() - begun_s
    assert seen == sorted(seen)
    assert {1, 2} & set(seen), "layers were not seen one by one"
    torch.cuda.synchronize()
    assert memory.written(5) == len(layers)


def test_a_captured_graph_does_not_repeat_what_was_said(rank):
    memory, word = rank
    progress = LayerProgress(word)
    layer = Implementation()
    progress.follow([layer])
    progress.begin(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward()
    graph.replay()
    torch.cuda.synchronize()
    assert memory.written(2) == 0
    progress.end()
    progress.begin(3)
    layer.forward()
    torch.cuda.synchronize()
    assert (memory.written(2), memory.written(3)) == (ALL_LAYERS, 1)
