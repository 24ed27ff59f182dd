"""Golden bytes: a message of today's version reads what yesterday's version wrote."""

from pathlib import Path

import pytest

from tests.tidy.wire_samples import SAMPLES

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_golden_bytes_still_decode_to_the_same_message(name):
    channel, message, raw = SAMPLES[name]
    blob = (GOLDEN / f"{name}.hex").read_text().split()
    frames = [bytes.fromhex(part) for part in blob]
    _, decoded, raw_frames = channel.unpack(frames)
    assert decoded == message
    assert raw_frames == list(raw)


def test_every_golden_file_has_a_sample():
    assert {p.stem for p in GOLDEN.glob("*.hex")} == set(SAMPLES)
