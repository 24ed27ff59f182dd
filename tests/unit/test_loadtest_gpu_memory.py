"""Who is said to hold a GPU's memory."""

import os
from pathlib import Path

import pytest

from loadtest import gpu_memory


@pytest.fixture
def told(tmp_path: Path, monkeypatch):
    """What nvidia-smi prints here."""

    def say(text: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{text}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return say


def test_each_process_is_named_by_its_words_without_paths_and_what_is_no_number_is_left_out(told):
    told(f"{os.getpid()}, 10\\n1, 3\\n2147483600, 5\\nNo devices were found\\n4, [N/A]\\n")
    mine, first, gone = gpu_memory.by_process()
    assert mine == {"command": "this process", "bytes": 10 << 20}
    assert first["bytes"] == 3 << 20
    assert "/" not in first["command"].split(" ")[0]
    assert gone == {"command": "gone", "bytes": 5 << 20}


def test_without_a_gpu_nobody_holds_anything(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory.by_process() == []
    assert gpu_memory.of_engine(tmp_path / "engine.json") == {}


def test_the_allocators_figures_have_names(tmp_path: Path):
    (tmp_path / "engine.memory").write_text("1 2 3 4")
    found = gpu_memory.of_engine(tmp_path / "engine.json")
    assert found == {
        "allocated_bytes": 1,
        "reserved_bytes": 2,
        "most_allocated_bytes": 3,
        "most_reserved_bytes": 4,
    }
