"""Golden bytes: a message of today's version reads what yesterday's version wrote."""

from pathlib import Path

import msgspec
import pytest

from tests.tidy.wire_samples import SAMPLES
from tests.tidy.wire_samples_lending import LENDING_SAMPLES

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


@pytest.mark.parametrize("name", sorted(LENDING_SAMPLES))
def test_the_golden_json_still_decodes_to_the_same_body(name):
    body = LENDING_SAMPLES[name]
    assert msgspec.json.decode((GOLDEN / f"lending-{name}.json").read_bytes(), type=type(body)) == body


def test_every_golden_json_has_a_sample():
    assert {p.stem for p in GOLDEN.glob("*.json")} == {f"lending-{name}" for name in LENDING_SAMPLES}
