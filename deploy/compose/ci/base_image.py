"""A stand-in for a Python base image where no registry can be reached: `base_image.py TAG` (Debian, root).

Takes the packages below and all that they depend on out of this machine's own dpkg database, and imports
exactly their files as a Docker image. Nothing is downloaded; pip, venv and apt-get work inside. It is for
tests only: this machine's Debian, not the published image.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("python3", "python3-venv", "ca-certificates", "apt")
DPKG = Path("/var/lib/dpkg")
# Written by maintainer scripts, so that no package lists them.
GENERATED = (
    "/etc/passwd", "/etc/group", "/etc/shadow", "/etc/nsswitch.conf", "/etc/ld.so.cache",
    "/etc/apt/sources.list", "/etc/ssl/certs/ca-certificates.crt", "/usr/bin/awk", "/etc/alternatives/awk",
)  # fmt: skip
APT_SOURCES = Path("/etc/apt/sources.list.d")
EMPTY_FOLDERS = (
    "proc", "sys", "dev", "run", "root", "var/cache/apt/archives/partial", "var/lib/apt/lists/partial",
    "var/lib/dpkg/info", "var/lib/dpkg/updates", "var/log/apt",
)  # fmt: skip
# /tmp and /var/tmp are special_members()
LEFT_OUT = re.compile(r"/usr/share/(doc|man|locale|info|lintian)/|/(var/)?tmp$")
MERGED_TOPS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links into /usr
PATH_VARIABLE = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Package:
    """One installed package; `wants` holds, for each dependency, its alternatives."""

    essential: bool
    wants: tuple[tuple[str, ...], ...]


def installed_packages() -> tuple[dict[str, Package], dict[str, str]]:
    """Packages by name, and which package provides each virtual name."""
    columns = r"${Package}\t${Essential}\t${db:Status-Status}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    listing = subprocess.run(["dpkg-query", "-W", "-f", columns], capture_output=True, text=True, check=True)
    packages: dict[str, Package] = {}
    providers: dict[str, str] = {}
    for line in listing.stdout.splitlines():
        name, essential, status, wants, provides = line.split("\t")
        if status != "installed":
            continue
        packages[name] = Package(essential == "yes", tuple(parse_names(group) for group in wants.split(",")))
        for virtual in parse_names(provides.replace(",", "|")):
            providers.setdefault(virtual, name)
    return packages, providers


def parse_names(alternatives: str) -> tuple[str, ...]:
    """`libc6 (>= 2.3) | libc6-udeb:any` -> ("libc6", "libc6-udeb")."""
    bare = (re.sub(r"\(.*?\)", "", part).strip().split(":")[0] for part in alternatives.split("|"))
    return tuple(name for name in bare if name)


def closure(packages: dict[str, Package], providers: dict[str, str], wanted: tuple[str, ...]) -> set[str]:
    """The wanted and the essential packages with everything they need. Raises: SystemExit."""
    missing = [name for name in wanted if name not in packages]
    if missing:
        raise SystemExit(f"base_image: install these first: apt-get install {' '.join(missing)}")
    pending = [*wanted, *(name for name, package in packages.items() if package.essential)]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for alternatives in packages[name].wants:
            real = (option if option in packages else providers.get(option) for option in alternatives)
            pending += [option for option in real if option][:1]
    return found


def files_of(names: set[str]) -> list[str]:
    """Absolute paths of the packages' files, parents before children."""
    paths = set(GENERATED) | {str(path) for path in APT_SOURCES.glob("*")}
    for listing in (DPKG / "info").glob("*.list"):
        if listing.stem.split(":")[0] in names:
            paths.update(listing.read_text("utf-8").splitlines())
    kept = {merged(path) for path in paths if path.startswith("/") and not LEFT_OUT.match(path)}
    return sorted(path for path in kept if path != "/." and os.path.lexists(path))


def merged(path: str) -> str:
    """/bin/sh -> /usr/bin/sh where /bin is a link into /usr."""
    top = path.split("/")[1]
    return f"/usr{path}" if top in MERGED_TOPS and os.path.islink(f"/{top}") and path != f"/{top}" else path


def special_members() -> Iterator[tarfile.TarInfo]:
    """Folders and links that no package lists."""
    for folder in EMPTY_FOLDERS:
        yield _member(folder, tarfile.DIRTYPE, 0o755)
    for folder in ("tmp", "var/tmp"):
        yield _member(folder, tarfile.DIRTYPE, 0o1777)
    for top in MERGED_TOPS:
        if os.path.islink(f"/{top}"):
            yield _member(top, tarfile.SYMTYPE, 0o777, f"usr/{top}")
    # The published image has `python` on its path.
    yield _member("usr/local/bin/python", tarfile.SYMTYPE, 0o777, "/usr/bin/python3")


def _member(name: str, kind: bytes, mode: int, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.linkname = kind, mode, link
    return member


def dpkg_status(names: set[str]) -> bytes:
    """dpkg's status file with only these packages, so that apt-get works inside."""
    entries = (DPKG / "status").read_text("utf-8").split("\n\n")
    kept = [
        entry for entry in entries if entry and entry.split("\n", 1)[0].removeprefix("Package: ") in names
    ]
    return ("\n\n".join(kept) + "\n").encode()


def write_archive(archive: tarfile.TarFile, names: set[str]) -> int:
    """Write the image; how many files it has."""
    linked = {f"/{top}" for top in MERGED_TOPS if os.path.islink(f"/{top}")}
    paths = [path for path in files_of(names) if path not in linked]
    for path in paths:
        archive.add(path, arcname=path[1:], recursive=False)
    for member in special_members():
        if f"/{member.name}" not in paths:
            archive.addfile(member)
    for path in (DPKG / "info").iterdir():
        if path.stem.split(":")[0] in names:
            archive.add(path, arcname=str(path)[1:], recursive=False)
    status = _member("var/lib/dpkg/status", tarfile.REGTYPE, 0o644)
    body = dpkg_status(names)
    status.size = len(body)
    archive.addfile(status, io.BytesIO(body))
    return len(paths)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: base_image.py TAG")
    packages, providers = installed_packages()
    names = closure(packages, providers, PACKAGES)
    command = ["docker", "import", "--change", PATH_VARIABLE, "--change", 'CMD ["python3"]', "-", sys.argv[1]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as docker:
        assert docker.stdin is not None  # PIPE was asked for
        with tarfile.open(fileobj=docker.stdin, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            num_files = write_archive(archive, names)
        docker.stdin.close()
    if docker.returncode:
        raise SystemExit(f"base_image: docker import failed with {docker.returncode}")
    print(f"{sys.argv[1]}: stand-in of {len(names)} packages, {num_files} files of this machine")


if __name__ == "__main__":
    main()
