"""How much memory this process may still take: the machine's, or what a limit of its control group leaves."""

from pathlib import Path

from shared.machine_memory import MachineMemory

GIB = 1 << 30


def machine(folder: Path, groups: str, files: dict[str, object]) -> MachineMemory:
    """With 32 GiB, 20 of them available."""
    proc, mounts = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {32 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {20 << 20} kB\nHugePages_Total: 0\n"
    )
    (proc / "self" / "cgroup").write_text(groups)
    for name, value in files.items():
        path = mounts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return MachineMemory(proc, mounts)


def of(found: MachineMemory) -> tuple[float, float]:
    return found.total_bytes() / GIB, found.available_bytes() / GIB


def test_without_a_limit_it_is_what_the_kernel_calls_available(tmp_path):
    assert of(machine(tmp_path / "none", "0::/\n", {})) == (32, 20)
    files = {"user/memory.max": "max", "user/memory.current": 3 * GIB}
    assert of(machine(tmp_path / "max", "0::/user\n", files)) == (32, 20)
    (tmp_path / "max" / "proc" / "self" / "cgroup").unlink()
    assert of(MachineMemory(tmp_path / "max" / "proc", tmp_path / "max" / "cgroup")) == (32, 20)


def test_a_groups_limit_counts_and_files_that_it_only_keeps_do_not(tmp_path):
    files = {
        "a/b/memory.max": 8 * GIB, "a/b/memory.current": 6 * GIB, "a/b/memory.stat": f"anon 1\ninactive_file {GIB}",
    }  # fmt: skip
    assert of(machine(tmp_path, "0::/a/b\n", files)) == (8, 3)


def test_the_tightest_of_all_groups_around_it_counts(tmp_path):
    files = {
        "a/b/memory.max": 8 * GIB, "a/b/memory.current": GIB, "a/memory.max": 16 * GIB, "a/memory.current": 14 * GIB,
    }  # fmt: skip
    assert of(machine(tmp_path / "two", "0::/a/b\n", files)) == (8, 2)
    own = {"memory.max": 4 * GIB, "memory.current": 5 * GIB}  # a container's own, mounted as the root
    assert of(machine(tmp_path / "own", "0::/docker/x\n", own)) == (4, 0)


def test_the_first_version_of_groups_says_it_in_other_files(tmp_path):
    groups = "9:cpu:/x\n4:memory:/docker/x\n0::/y\n"
    files = {
        "memory/memory.limit_in_bytes": 6 * GIB, "memory/memory.usage_in_bytes": 5 * GIB,
        "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {2 * GIB}",
    }  # fmt: skip
    assert of(machine(tmp_path / "limit", groups, files)) == (6, 3)
    files["memory/memory.limit_in_bytes"] = 9223372036854771712  # none
    assert of(machine(tmp_path / "none", groups, files)) == (32, 20)
