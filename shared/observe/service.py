"""The frame of a service's process: settings, log, traces, loop, signals, exit status.

Statuses: 0 after SIGTERM or SIGINT, 2 on wrong settings (said on stderr, since no logger may be there yet), 70 on
a bug of ours.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import uvloop

from shared.background_task import LOST_TASK
from shared.errors import SettingsError
from shared.frame_room import with_frame_room
from shared.observe import log, trace
from shared.vital_thread import EXIT_BUG

EXIT_SETTINGS = 2


class ServiceSettings(Protocol):
    """What every service's settings have."""

    @property
    def instance(self) -> str: ...

    @property
    def log_level(self) -> str: ...

    @property
    def trace_endpoint(self) -> str: ...

    @property
    def trace_dir(self) -> str: ...

    @property
    def trace_sample_ratio(self) -> float: ...


Settings = TypeVar("Settings", bound=ServiceSettings)
_SECRET = ("redis_url", "coordinator_key")  # or with a password in it


def main(
    service: str,
    load: Callable[[Sequence[str]], Settings],
    run: Callable[[Settings], Coroutine[Any, Any, int]],
) -> int:
    """Load settings from the command line, set up log and traces, run until the end; the exit status."""
    if not __debug__:
        print("quire does not run with -O: it relies on its assertions", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    try:
        settings = load(sys.argv[1:])
        log.setup(service, settings.instance, settings.log_level)
        trace.setup(
            service,
            settings.instance,
            endpoint=settings.trace_endpoint,
            directory=settings.trace_dir,
            sample_ratio=settings.trace_sample_ratio,
        )
        return with_frame_room(uvloop.run, run(settings))
    except SettingsError as error:
        print(f"{service}: {error.message}", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    finally:
        trace.shutdown()


def shown(settings: msgspec.Struct) -> dict[str, Any]:
    """Effective settings for the log: of what is secret whether it is there, of keys how many."""
    found = msgspec.structs.asdict(settings)
    hidden = {name: bool(found[name]) for name in _SECRET if name in found}
    return found | hidden | {name: len(keys) for name, keys in found.items() if name == "api_keys"}


def end_on_signal() -> asyncio.Future[int]:
    """Done with status 0 at the first SIGTERM or SIGINT. Call it on the loop."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, ended, 0)
    return ended


def end_on_bug(
    service: str, ended: asyncio.Future[int], state: Callable[[], dict[str, Any]] | None = None
) -> None:
    """From now on a callback of the loop that raises, or a background task that ends by a bug, ends the service with
    status 70: its state may be half changed.

    Args: state: what to log then.
    """
    logger = log.get_logger(service)

    def on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        _log_loop_error(logger, context)
        if (
            "handle" in context or LOST_TASK in context
        ):  # the rest is connections, and tasks that somebody awaits
            if state is not None:
                logger.error("invariant_broken", **state())
            _end(ended, EXIT_BUG)

    asyncio.get_running_loop().set_exception_handler(on_loop_error)


def end_on_lost_task(service: str, ended: asyncio.Future[int]) -> None:
    """From now on a background task that ends by a bug ends the service with status 70: what it did is done no more.

    For gateways and workers. A callback that raises is only logged there: it was one request's or one message's, and
    all the others would end with it, in one process after another where the request is repeated.
    """
    logger = log.get_logger(service)

    def on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        _log_loop_error(logger, context)
        if LOST_TASK in context:
            _end(ended, EXIT_BUG)

    asyncio.get_running_loop().set_exception_handler(on_loop_error)


def _log_loop_error(logger: Any, context: dict[str, Any]) -> None:
    logger.error("loop_error", message=context["message"], exc_info=context.get("exception"))


def _end(ended: asyncio.Future[int], status: int) -> None:
    if not ended.done():
        ended.set_result(status)
