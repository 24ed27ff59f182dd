"""`quire kill NAME`: a signal to one service, for experiments with failures."""

import signal
from typing import Annotated

import typer

from deploy.local.terminal import connect, fail, out


def kill(
    name: Annotated[str, typer.Argument(help="Service, as `quire status` names it.")],
    signal_name: Annotated[
        str, typer.Option("--signal", "-s", help="Name or number: KILL, TERM, STOP, CONT, ...")
    ] = "KILL",
) -> None:
    """Send a signal to one service. A service that dies of it is started again, with back-off."""
    wanted = signal_name.upper().removeprefix("SIG")
    names = {s.name.removeprefix("SIG"): s for s in signal.Signals} | {str(int(s)): s for s in signal.Signals}
    if wanted not in names:
        raise typer.BadParameter(f"no signal {signal_name!r}; try KILL, TERM, STOP or CONT")
    with connect() as client:
        answer = client.call(op="kill", name=name, signal=int(names[wanted]))
    if "error" in answer:
        fail(answer["error"])
    out.print(f"{names[wanted].name} sent to {name} (pid {answer['pid']})")
