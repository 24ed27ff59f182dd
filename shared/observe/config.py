"""What OpenTelemetry's own variables say of a collector: keys that it wants, and what all spans are marked with.

The names and their form are OpenTelemetry's ("OTLP Exporter Configuration", "Resource SDK"), so that what an operator
has set for other services holds for ours: NAME=VALUE,NAME=VALUE, values percent-encoded.
"""

import os
import re
from collections.abc import Mapping
from urllib.parse import unquote

from shared.errors import SettingsError

HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")  # the first that is set
RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110's token
_OURS = ("content-type", "content-length", "host", "transfer-encoding", "connection")


def collector_headers(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """To be sent with every export, such as an API key.

    Raises: SettingsError, which says no value: they are secrets.
    """
    env = _environment(environ)
    variable = next((name for name in HEADERS if env.get(name, "").strip()), HEADERS[-1])
    found = _pairs(variable, env.get(variable, ""))
    for name, value in found.items():
        if not _NAME.fullmatch(name) or name.lower() in _OURS:
            raise SettingsError(f"{variable}: {name[:64]!r} is no header that can be chosen")
        if not value.isascii() or not value.isprintable():
            raise SettingsError(f"{variable}: the value of {name} has characters that no header may have")
    return found


def resource_attributes(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of every span of this process, beside its service's name. Raises: SettingsError."""
    return _pairs(RESOURCE, _environment(environ).get(RESOURCE, ""))


def _environment(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ  # noqa: TID251  a config.py: the names are not ours


def _pairs(variable: str, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, is_pair, value = part.partition("=")
        if not is_pair or not name.strip():
            raise SettingsError(f"{variable} is not of the form NAME=VALUE,NAME=VALUE")
        found[unquote(name.strip())] = unquote(value.strip())
    return found
