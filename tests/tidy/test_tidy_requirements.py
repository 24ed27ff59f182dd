"""The locked requirements: what one kind of machine has for tests the other has too."""

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
