"""`quire stages`: where the time of recent requests went, all of them together."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from deploy.local import config
from deploy.local.terminal import fail, out, status_or_none
from shared.errors import SettingsError
from shared.observe import stages as observed

DEFAULT_LAST_S = 300.0
MOST_LAST_S = 1e9  # 31 years: a longer time is no time in nanoseconds


def stages(
    last_s: Annotated[
        float, typer.Option("--last", min=0.001, help="Requests that began in so many seconds until now.")
    ] = DEFAULT_LAST_S,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Local span store. Default: the cluster's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print how long each stage of recent requests took: median, mean and P99 over all that were traced.

    Spans reach the store a second or two after they end. Traces that go to a collector are not here.
    """
    if not 0 < last_s <= MOST_LAST_S:
        raise SettingsError(f"--last {last_s:g}: want seconds, {MOST_LAST_S:g} at most")
    store = folder or config.paths_of(config.default_home()).traces
    found, num_requests, is_cut = observed.read_stages(store, since_ns=time.time_ns() - int(last_s * 1e9))
    if as_json:
        body = {"num_requests": num_requests, "warning": observed.warning(is_cut)}
        body |= {"stages": msgspec.to_builtins(found)}
        out.print(msgspec.json.encode(body).decode(), no_wrap=True, overflow="ignore", crop=False)
        return
    if not found:
        status = status_or_none()
        endpoint = status["trace_endpoint"] if status else ""
        hint = f"; traces go to {endpoint}" if endpoint else "; --last SECONDS looks further back"
        fail(f"no traced request in the last {last_s:g} s in {store}{hint}")
    text = observed.render(found, num_requests, is_cut)
    out.print(text, end="", no_wrap=True, overflow="ignore", crop=False)
