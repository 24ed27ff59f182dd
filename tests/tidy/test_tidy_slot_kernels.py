"""The kernels of the layouts without a block table are exchanged in one small file."""

from pathlib import Path

from shared.engine import slot_kernels

FILE = Path(slot_kernels.__file__)


def test_all_kernels_are_in_one_file_of_at_most_twenty_lines():
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 120


def test_no_block_table_is_passed_to_any_of_them():
    text = FILE.read_text()
    assert "block_table" not in text
    assert "block_ids" not in text
    kernels = [name for name in vars(slot_kernels) if callable(vars(slot_kernels)[name]) and name != "Any"]
    assert sorted(kernels) == ["flash3", "torch_flash2", "torch_sdpa"]
