"""Rules of the house that a machine can hold: layout, sizes, forbidden words, listeners, dead files."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FIXED_FOLDERS = [
    *(f"services/{name}" for name in ("gateway", "scheduler", "prefill", "decode", "mempool", "coordinator")),
    "shared",
    "deploy/compose",
    "deploy/local",
    "loadtest",
    "tests",
    "docs/decisions",
]
FIXED_FILES = [
    "README.md",
    "ARCHITECTURE.md",
    "GLOSSARY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
    ".ci/run",
    *(
        f"services/{name}/README.md"
        for name in ("gateway", "scheduler", "prefill", "decode", "mempool", "coordinator")
    ),
]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
IS_TEXT = "# of a str"  # which cannot be bad UTF-8


def tracked(*suffixes: str) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    paths = [ROOT / name for name in names]
    return [p for p in paths if p.is_file() and (not suffixes or p.suffix in suffixes)]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("name", FIXED_FOLDERS)
def test_every_fixed_folder_is_there_and_holds_something(name):
    folder = ROOT / name
    assert folder.is_dir(), f"{name}/ is missing"
    assert any(p.is_relative_to(folder) for p in tracked()), f"{name}/ is empty"


@pytest.mark.parametrize("name", FIXED_FILES)
def test_every_fixed_file_is_there(name):
    assert (ROOT / name).is_file(), f"{name} is missing"


@pytest.mark.parametrize("name", ["gateway", "scheduler", "prefill", "decode", "mempool", "coordinator"])
def test_every_service_has_the_one_shape(name):
    folder = ROOT / "services" / name
    for part in ("__main__.py", "config.py", "README.md"):
        assert (folder / part).is_file(), f"services/{name}/{part} is missing"


def test_files_stay_readable():
    too_long = {
        relative(p): n for p in tracked(".py") if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not too_long, f"split by concept: {too_long}"


def test_functions_stay_readable():
    too_long = {}
    for path in tracked(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long[f"{relative(path)}:{node.name}"] = lines
    assert not too_long, f"split: {too_long}"


def test_no_module_is_dead():
    """Every module is imported, run with -m, named in a setting, or a test."""
    skipped = {"__init__.py", "__main__.py", "conftest.py", "locustfile.py"}
    modules = [p for p in tracked(".py") if p.name not in skipped and not p.name.startswith("test_")]
    users: dict[str, set[Path]] = {path.stem: set() for path in modules}
    for path in tracked():
        if path.suffix not in {".safetensors", ".png"}:
            for word in users.keys() & set(re.findall(r"\w+", path.read_text(errors="replace"))):
                users[word].add(path)
    dead = [relative(path) for path in modules if not users[path.stem] - {path}]
    assert not dead, f"nobody uses: {dead}"


# Written in pieces, so that this file does not contain what it forbids.
FORBIDDEN = [
    r"/wo" + r"rk/",
    r"/ro" + r"ot/",
    "files.python" + "hosted",
    "py" + r"pi\.org",
    "registry." + "npmjs",
    "proxy.go" + "lang",
    r"farm-" + r"(bench|studio)",
]


def test_no_machine_path_or_package_host_in_the_tree():
    found = []
    pattern = re.compile("|".join(FORBIDDEN))
    for path in tracked():
        if path.suffix in {".safetensors", ".png", ".npz"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


SOURCES = ("services/", "shared/", "deploy/", "loadtest/")


def test_nothing_from_a_socket_is_unpickled():
    pattern = re.compile(r"\bpickle\b|recv_pyobj|torch\.load\(|yaml\.load\(|\beval\(|marshal\.loads|\bdill\b")
    found = [
        f"{relative(p)}:{n}: {line.strip()}"
        for p in tracked(".py")
        if relative(p).startswith(SOURCES)
        for n, line in enumerate(p.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_who_catches_msgspecs_errors_catches_bad_utf8_too():
    """msgspec raises UnicodeDecodeError as it is; ValueError covers it. ValidationError: of what is decoded already."""
    for path in tracked(".py"):
        if path.relative_to(ROOT).parts[0] not in ("services", "shared", "deploy"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                caught = ast.unparse(node.type)
                if re.search(r"\b(MsgspecError|DecodeError)\b", caught):
                    named = "UnicodeDecodeError" in caught or "ValueError" in caught
                    assert named or IS_TEXT in path.read_text().splitlines()[node.lineno - 1], (
                        path,
                        node.lineno,
                    )


def test_only_compose_listens_on_every_interface():
    pattern = re.compile(r"0\.0\.0\.0|tcp://\*|\[::\]")
    found = [
        f"{relative(p)}:{n}: {line.strip()}"
        for p in tracked(".py", ".toml", ".sh")
        if relative(p).startswith(SOURCES)
        for n, line in enumerate(p.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_half_finished_work_is_left():
    pattern = re.compile(r"NotImplementedError|FIXME|XXX|TODO(?!\(#\d+\))|except Exception:\s*pass|except:")
    found = [
        f"{relative(p)}:{n}: {line.strip()}"
        for p in tracked(".py")
        if relative(p).startswith(SOURCES)
        for n, line in enumerate(p.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)
