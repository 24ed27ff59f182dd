"""A model folder's fingerprint changes with whatever changes its KV, and with nothing else."""

import pytest
import torch
from safetensors.torch import save

from shared.errors import SettingsError
from shared.kv import fingerprint
from shared.kv.fingerprint import model_fingerprint


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return tmp_path


def test_the_same_bytes_in_another_place_have_the_same_fingerprint(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("copy")
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert model_fingerprint(str(folder)) == model_fingerprint(str(other))
    assert len(model_fingerprint(str(folder))) == 32


def test_files_that_do_not_make_kv_do_not_count(folder):
    before = model_fingerprint(str(folder))
    (folder / "README.md").write_text("hello")
    (folder / "tokenizer.json").write_text("{}")
    assert model_fingerprint(str(folder)) == before


@pytest.mark.parametrize("change", ["weights", "config", "name", "extra"])
def test_every_change_of_weights_or_config_shows(folder, change):
    before = model_fingerprint(str(folder))
    weights = folder / "model.safetensors"
    if change == "weights":
        data = bytearray(weights.read_bytes())
        data[777] ^= 1
        weights.write_bytes(data)
    elif change == "config":
        (folder / "config.json").write_text('{"hidden_size": 65}')
    elif change == "name":
        weights.rename(folder / "other.safetensors")
    else:
        (folder / "model-2.safetensors").write_bytes(b"x")
    assert model_fingerprint(str(folder)) != before


def test_a_large_model_is_sampled_at_head_tail_and_between(folder, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 100)
    before = model_fingerprint(str(folder))
    weights = folder / "model.safetensors"
    original = weights.read_bytes()
    size = len(original)
    for position in (0, 99, size - 1, size - 100, (size - 100) * 3 // 7 + 50):
        data = bytearray(original)
        data[position] ^= 1
        weights.write_bytes(data)
        assert model_fingerprint(str(folder)) != before, position
    weights.write_bytes(original)
    assert model_fingerprint(str(folder)) == before


def test_every_tensor_of_a_large_model_is_sampled(folder, monkeypatch):
    for name, value in {"WHOLE_BYTES": 1000, "PIECE_BYTES": 10, "SPOT_BYTES": 16}.items():
        monkeypatch.setattr(fingerprint, name, value)
    weights = folder / "model.safetensors"
    good = save({f"layers.{i}": torch.zeros(5000, dtype=torch.uint8) for i in range(8)})
    found = set()
    for position in (5000 * i + at for i in range(-8, 0) for at in (0, 2500, 4999)):
        data = bytearray(good)
        data[position] = 1
        weights.write_bytes(data)
        found.add(model_fingerprint(str(folder)))
    assert len(found) == 24
    monkeypatch.setattr(fingerprint, "SPOT_EVERY_BYTES", 500)
    for expert in range(10):  # of the last one, fused
        data = bytearray(good)
        data[-5000 + 500 * expert : -5000 + 500 * (expert + 1)] = b"1" * 500
        weights.write_bytes(data)
        found.add(model_fingerprint(str(folder)))
    assert len(found) == 34
    for bad in (b"\xff" * 8 + good, bytes(8) + good, good[:8] + b"[" * len(good), good[:-1]):
        weights.write_bytes(bad)
        with weights.open("rb") as file:
            assert not fingerprint._spots(file, len(bad))


def test_a_folder_without_config_or_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match="no weights"):
        model_fingerprint(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(SettingsError, match=r"config\.json"):
        model_fingerprint(str(folder))
