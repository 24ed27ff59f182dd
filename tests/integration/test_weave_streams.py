"""Two parts of a step on two streams, on a GPU that runs what it was given as late, and in as odd an order, as it may.

The real forward and the real streams; torch.cuda is a machine that only keeps the order within a stream and what
events ask for. Products write the lane's input, the fused operation reads it and writes the lane's output, residuals
are written in place, as on a GPU: whatever was not waited for is read too early, or overwritten.
"""

import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from shared.engine import weave_forward
from shared.engine.weave_cuts import CutStep
from shared.engine.weave_forward import OneAfterTheOther, TwoStreams, WovenForward
from shared.engine.weave_layers import FusedSums
from shared.weave.woven_order import PARTS

NUM_LAYERS = 3
TOKENS = (slice(0, 5), slice(5, 8))


class Cell:
    """Memory of the machine: a value, and slices and copies of it as a tensor has them."""

    def __init__(self, value):
        self.value = value
        self.rows: dict[tuple, Cell] = {}

    def __getitem__(self, tokens):
        key = (tokens.start, tokens.stop)
        return self.rows.setdefault(key, Cell((self.value, *key)))


class Stream:
    """Work in order. A wait stops it until its event's record has run."""

    def __init__(self, machine):
        self.machine, self.work = machine, deque()
        machine.streams.append(self)

    def wait_event(self, event):
        count = event.recorded
        self.work.append(lambda: event.passed >= count or "wait")


class Event:
    def __init__(self):
        self.recorded = self.passed = 0

    def record(self, stream):
        self.recorded += 1

        def passes():
            self.passed += 1

        stream.work.append(passes)


class Machine:
    """In the place of torch.cuda."""

    def __init__(self, rng):
        self.rng, self.streams = rng, []
        self.compute = self.now = Stream(self)

    def give(self, work):
        self.now.work.append(work)

    def run(self):
        """Everything, one piece at a time, by chance. Streams that wait for each other would end in an assertion."""
        waiting: set[int] = set()
        while any(stream.work for stream in self.streams):
            able = [i for i, stream in enumerate(self.streams) if stream.work and i not in waiting]
            assert able, "both streams wait"
            chosen = self.rng.choice(able)
            if self.streams[chosen].work[0]() == "wait":
                waiting.add(chosen)
                continue
            self.streams[chosen].work.popleft()
            waiting.clear()

    def in_place_of_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: Stream(self))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.now)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "now", stream))


class Fused:
    """Reads and writes when the machine comes to it; the lane's cells are the same in every call."""

    max_tokens, dtype, few_sms = 100, None, 0

    def __init__(self, machine):
        self.machine = machine
        self.inputs, self.outs = ([Cell(None) for _ in PARTS] for _ in range(2))
        self.streams, self.sms = set(), set()

    def run(self, partial, residual, weight, eps, *, lane=0, num_sms=0):
        self.streams.add(self.machine.now)
        self.sms.add(num_sms)

        def work():
            residual.value = ("add", residual.value, partial.value)
            self.outs[lane].value = ("norm", weight, residual.value)

        self.machine.give(work)
        return self.outs[lane], residual


class Model:
    """A trunk whose blocks read what they are given when their turn comes; attention also reads the parts before."""

    def __init__(self, machine, sums):
        self.machine, self.sums = machine, sums
        self.keys: dict[tuple, object] = {}
        layers = [
            SimpleNamespace(
                self_attn=self.block(("attn", number)), mlp=self.block(("mlp", number)),
                input_layernorm=self.norm(("in", number)), post_attention_layernorm=self.norm(("post", number)),
            )
            for number in range(NUM_LAYERS)
        ]  # fmt: skip
        self.model = SimpleNamespace(
            layers=layers, start_layer=0, end_layer=NUM_LAYERS, norm=self.norm("last")
        )

    def forward(self):
        raise AssertionError("the step is cut")

    def norm(self, name):
        def plain(rows):
            out = Cell(None)

            def work():
                out.value = ("norm", name, rows.value)

            self.machine.give(work)
            return out

        return SimpleNamespace(plain=plain, weight=SimpleNamespace(data=name), eps=0.0)

    def block(self, name):
        def call(hidden_states, positions=None):
            out, part = self.sums.fused.inputs[self.sums.lane], self.sums.lane

            def work():
                seen = ()
                if positions is not None:
                    self.keys[name, part] = hidden_states.value
                    seen = tuple(self.keys[name, before] for before in range(part))
                out.value = (name, hidden_states.value, positions and positions.value, seen)

            self.machine.give(work)
            return out

        return call


def result(monkeypatch, seed: int, streams_of) -> tuple[object, Fused]:
    machine = Machine(random.Random(seed))
    machine.in_place_of_cuda(monkeypatch)
    sums = FusedSums(Fused(machine))
    out = Cell(None)

    def cat(parts):
        def work():
            out.value = tuple(part.value for part in parts)

        machine.give(work)
        return out

    monkeypatch.setattr(weave_forward, "torch", SimpleNamespace(cat=cat, cuda=torch.cuda))
    forward = WovenForward(Model(machine, sums), sums, SimpleNamespace(), streams_of(), 12)
    contexts = (SimpleNamespace(), SimpleNamespace())
    for step in range(2):  # the second one finds lanes and events as the first one left them
        forward.weave(Cell(("hidden", step)), Cell("positions"), CutStep(TOKENS, contexts))
    assert machine.now is machine.compute
    assert sums.lane == 0
    machine.run()
    return out.value, sums.fused


@pytest.mark.parametrize("seed", range(60))
def test_whatever_order_the_gpu_takes_the_result_is_that_of_one_after_the_other(monkeypatch, seed):
    want, alone = result(monkeypatch, 0, OneAfterTheOther)
    assert len(alone.streams) == 1
    got, fused = result(monkeypatch, seed, lambda: TwoStreams(torch.device("cpu")))
    assert got == want
    assert len(fused.streams) == 1, "all communication is on one stream, in one order on every rank"
    assert fused.sms == {12}


@pytest.mark.parametrize("left_out", ["wait", "send_wait"])
def test_without_one_of_the_waits_some_order_shows_it(monkeypatch, left_out):
    class Careless(TwoStreams):
        def wait(self, part):
            if left_out != "wait":
                super().wait(part)

        def send(self, part):
            if left_out != "send_wait":
                super().send(part)
            else:
                torch.cuda.set_stream(self._comm)

    want, _ = result(monkeypatch, 0, OneAfterTheOther)
    found = set()
    for seed in range(30):
        try:
            got, _ = result(monkeypatch, seed, lambda: Careless(torch.device("cpu")))
            found.add(got == want)
        except KeyError:  # keys that are not there yet
            found.add(False)
    assert False in found
