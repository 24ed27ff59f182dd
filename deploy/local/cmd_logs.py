"""`quire logs [NAME] [-f]`: the services' log files, each line behind its service's name."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from deploy.local import config
from deploy.local.launch import tail
from deploy.local.terminal import fail, out

POLL_S = 0.2


def logs(
    name: Annotated[str, typer.Argument(help="Service; default: all.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 40,
) -> None:
    """Print the last lines of the logs. They stay readable after the cluster has stopped."""
    folder = config.paths_of(config.default_home()).logs
    files = sorted(folder.glob("*.log"))
    if name:
        known = [file.stem for file in files]
        files = [folder / f"{name}.log"]
        if name not in known:
            fail(f"no log of {name!r}; there are: {', '.join(known) or 'none'}")
    if not files:
        fail(f"no logs in {folder}; nothing was started yet")
    width = max(len(file.stem) for file in files)
    places = {file: _size(file) for file in files}
    for file in files:
        for line in tail(file, lines=lines, max_bytes=4 << 20):
            _show(file, line, width, prefix=not name)
    try:
        while follow:
            time.sleep(POLL_S)
            if not name:  # services that have started since
                files = sorted(folder.glob("*.log"))
                width = max(width, *(len(file.stem) for file in files), 0)
            for file in files:
                places[file] = _follow(file, places.get(file, 0), width, prefix=not name)
    except KeyboardInterrupt:
        return


def _follow(file: Path, place: int, width: int, *, prefix: bool) -> int:
    """Print the whole lines after `place`; the new place."""
    size = _size(file)
    if size < place:  # it was cut or replaced
        place = 0
    if size == place:
        return place
    with file.open("rb") as log:
        log.seek(place)
        chunk = log.read(size - place)
    whole = chunk[: chunk.rfind(b"\n") + 1]
    for line in whole.decode("utf-8", "replace").splitlines():
        _show(file, line, width, prefix=prefix)
    return place + len(whole)


def _show(file: Path, line: str, width: int, *, prefix: bool) -> None:
    head = f"{file.stem:<{width}} | " if prefix else ""
    out.print(head + line)


def _size(file: Path) -> int:
    try:
        return os.stat(file).st_size
    except FileNotFoundError:
        return 0
