"""The locked requirements: what one kind of machine has for tests the other has too, and each lock is there once."""

import re
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"


def own_locks(name: str) -> set[str]:
    """NAME==VERSION of a file's own lines, not of those that it includes."""
    return set(re.findall(r"^([\w.-]+==[^\s\\;]+)", (REQUIREMENTS / name).read_text("utf-8"), re.MULTILINE))


def test_a_machine_with_a_gpu_installs_for_its_tests_what_one_without_installs():
    for device in ("cpu", "cuda"):
        assert (REQUIREMENTS / f"dev-{device}.txt").read_text(
            "utf-8"
        ) == f"-r engine-{device}.txt\n-r dev.txt\n"
    assert {"matplotlib", "pytest", "locust"} <= {lock.partition("==")[0] for lock in own_locks("dev.txt")}


def test_what_both_kinds_of_engine_need_is_locked_once():
    whole = {name: (REQUIREMENTS / name).read_text("utf-8") for name in ("engine-cpu.txt", "engine-cuda.txt")}
    assert all("-r engine.txt\n" in text for text in whole.values())
    both = own_locks("engine.txt")
    assert len(both) > 100
    for name in whole:
        assert not own_locks(name) & both, name
    blocks = [set(re.split(r"\n(?=\S)", text.strip())) for text in whole.values()]
    assert blocks[0] & blocks[1] == {"-r engine.txt"}
