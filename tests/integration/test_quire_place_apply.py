"""`quire place --apply`: a running coordinator pairs whom the placer paired, or the command says why not."""

import httpx
from typer.testing import CliRunner

from deploy.local.cli import app
from shared.errors import SettingsError
from tests.integration.lending_rig import coordinator

__all__ = ["coordinator"]  # fixture

FILE = """
[[servers]]
name = "h200"
gpus = 2
gpu_memory_bytes = "141 GB"
[[models]]
model = "diffusion"
bytes_per_gpu = "60 GB"
instances = ["diffusion-0"]
[[models]]
model = "llama-8b"
bytes_per_gpu = "-20 GB"
instances = ["decode-0"]
"""


def place(tmp_path, *words):
    (tmp_path / "cluster.toml").write_text(FILE)
    return CliRunner().invoke(app, ["place", str(tmp_path / "cluster.toml"), *words])


def test_a_running_coordinator_is_told_who_borrows_from_whom(coordinator, tmp_path):
    done = place(tmp_path, "--apply", coordinator.url)
    assert done.exit_code == 0, done.output
    assert "pairs 1 consumers with their producers" in done.output
    assert httpx.get(coordinator.url + "/v1/placement").json() == {
        "pairs": [{"consumer": "decode-0", "producer": "diffusion-0"}]
    }


def test_nobody_is_told_without_being_asked_and_a_coordinator_that_is_not_there_is_an_error(
    coordinator, tmp_path
):
    assert place(tmp_path).exit_code == 0
    assert httpx.get(coordinator.url + "/v1/placement").json() == {"pairs": []}
    nowhere = place(tmp_path, "--apply", "http://127.0.0.1:1")
    assert nowhere.exit_code == 1
    assert "was not told" in nowhere.output
    wrong = place(tmp_path, "--apply", "127.0.0.1:8103")
    assert isinstance(wrong.exception, SettingsError)


def test_pairs_that_no_mempool_can_serve_are_left_out(coordinator, tmp_path):
    """Every loan of theirs would be refused, and the producer kept from others."""
    (tmp_path / "cluster.toml").write_text(
        FILE.replace("gpus = 2", "gpus = 3").replace('model = "llama-8b"', 'model = "llama-8b"\ntp = 2')
    )
    done = CliRunner().invoke(app, ["place", str(tmp_path / "cluster.toml"), "--apply", coordinator.url])
    assert done.exit_code == 0, done.output
    assert "pairs 0 consumers" in done.output
    assert "1 pairs are left out" in done.output
    assert httpx.get(coordinator.url + "/v1/placement").json() == {"pairs": []}


def test_consumers_are_counted_and_not_their_gpus(coordinator, tmp_path):
    """Of two ranks each has a pair of its own."""
    file = FILE.replace("gpus = 2", "gpus = 4").replace('GB"\ninstances', 'GB"\ntp = 2\ninstances')
    (tmp_path / "cluster.toml").write_text(file)
    done = CliRunner().invoke(app, ["place", str(tmp_path / "cluster.toml"), "--apply", coordinator.url])
    assert done.exit_code == 0, done.output
    assert "pairs 1 consumers with their producers" in done.output
