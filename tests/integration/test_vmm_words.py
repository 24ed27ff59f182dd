"""Words between two processes: who sees the word sees all that was written before it."""

import mmap
import os
import subprocess
import sys

import pytest

from shared.vmm.errors import BadMapping
from shared.vmm.words import Words

ROUNDS = 20_000
PAYLOAD = 64  # words that belong to a published one

READER = """
import mmap, sys
from shared.vmm.words import Words
memory = mmap.mmap(int(sys.argv[1]), 8192, prot=mmap.PROT_READ)
words = Words(memory, 1, native=sys.argv[2] == "native")
payload = memoryview(memory)[4096:].cast("Q")
seen = torn = last = 0
print("ready", flush=True)
while last < int(sys.argv[3]):
    before = words.load(0)
    if before == last or before % 2:
        continue
    copy = payload[:64].tolist()
    if words.load(0) != before:
        continue  # a seqlock's retry
    seen += 1
    torn += copy != [before] * 64 or before < last
    last = before
print(seen, torn)
"""


@pytest.mark.parametrize("way", ["native", "plain"])
def test_a_published_word_comes_behind_its_payload(way):
    fd = os.memfd_create("words")
    os.ftruncate(fd, 8192)
    memory = mmap.mmap(fd, 8192)
    words = Words(memory, 1, native=way == "native")
    payload = memoryview(memory)[4096:].cast("Q")
    command = [sys.executable, "-c", READER, str(fd), way, str(2 * ROUNDS)]
    reader = subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    for n in range(1, ROUNDS + 1):
        words.store(0, 2 * n - 1)
        for i in range(PAYLOAD):
            payload[i] = 2 * n
        words.store(0, 2 * n)
    out, _ = reader.communicate(timeout=60)
    seen, torn = map(int, out.split())
    assert torn == 0
    assert seen > 0
    words.close()
    payload.release()
    memory.close()
    os.close(fd)


@pytest.mark.parametrize("native", [True, False])
def test_words_are_whole_u64_inside_their_memory(native):
    memory = mmap.mmap(-1, 4096)
    words = Words(memory, 4, 16, native=native)
    for value in (0, 1, (1 << 64) - 1, 0x0123456789ABCDEF):
        words.store(3, value)
        assert words.load(3) == value == int.from_bytes(memory[40:48], "little")
    for wrong in (4, -1):
        with pytest.raises(IndexError):
            words.load(wrong)
        with pytest.raises(IndexError):
            words.store(wrong, 0)
    with pytest.raises(ValueError, match="18446744073709551616"):
        words.store(0, 1 << 64)
    words.close()
    for num_words, offset in ((0, 0), (513, 0), (1, 4), (1, 4096)):
        with pytest.raises(BadMapping):
            Words(memory, num_words, offset)
    memory.close()


def test_read_only_words_are_not_written():
    fd = os.memfd_create("words")
    os.ftruncate(fd, 4096)
    memory = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
    words = Words(memory, 1)
    assert words.load(0) == 0
    with pytest.raises(TypeError):
        words.store(0, 1)
    words.close()
    memory.close()
    os.close(fd)
