"""What a rank says of its step, layer by layer."""

import os

import pytest

torch = pytest.importorskip("torch")

from shared.engine.layer_progress import LayerProgress, open_word  # noqa: E402
from shared.kv.layer_words import ALL_LAYERS, MEMORY_BYTES, layer_word, layers_written  # noqa: E402


class Recorder:
    def __init__(self):
        self.words = []

    def write(self, value):
        self.words.append(value)


class Implementation:
    """Of one layer's attention; says what was said before it returned."""

    def __init__(self, word):
        self.word = word

    def forward(self, query, *, output):
        self.seen = list(self.word.words)
        return query + output


@pytest.fixture
def followed():
    word = Recorder()
    layers = [Implementation(word) for _ in range(3)]
    progress = LayerProgress(word)
    progress.follow(layers)
    return word, layers, progress


def test_a_layer_is_said_to_be_written_only_after_its_call_has_returned(followed):
    word, layers, progress = followed
    progress.begin(4)
    for number, layer in enumerate(layers):
        assert layer.forward(1, output=2) == 3
        assert len(layer.seen) == number
    progress.end()
    assert word.words == [layer_word(4, n) for n in (1, 2, 3)]


def test_words_only_grow_whatever_is_repeated_or_comes_between_steps(followed):
    word, layers, progress = followed
    layers[0].forward(1, output=1)  # a dummy run
    for step in (2, 2, 3):  # an empty step repeats its number
        progress.begin(step)
        layers[0].forward(1, output=1)
        layers[0].forward(1, output=1)
        progress.end()
    assert word.words == sorted(set(word.words))
    assert [layers_written(word.words[-1], step) for step in (2, 3)] == [ALL_LAYERS, 1]


def test_a_layer_before_its_turn_is_not_said_to_be_written(followed):
    word, layers, progress = followed
    progress.begin(1)
    layers[1].forward(1, output=1)
    assert word.words == []
    layers[0].forward(1, output=1)
    layers[2].forward(1, output=1)
    progress.end()
    assert word.words == [layer_word(1, 1)]


def test_the_word_is_the_first_of_the_shared_memory():
    fd = os.memfd_create("layers")
    os.ftruncate(fd, MEMORY_BYTES)
    open_word(os.dup(fd), torch.device("cpu")).write(layer_word(9, 7))
    assert int.from_bytes(os.pread(fd, 8, 0), "little") == layer_word(9, 7)
    os.close(fd)
