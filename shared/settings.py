"""Settings from defaults, one TOML file, QUIRE_* variables and flags, in rising order of precedence.

Each service has one frozen struct; its field names are the flags (`--max-body-bytes`), the keys of the
TOML section named after the service and, upper-cased, the variables (`QUIRE_GATEWAY_MAX_BODY_BYTES`).
Unknown keys are refused with the nearest right one; `--help` lists all. This module and the config.py
files are the only readers of the environment.
"""

import difflib
import math
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from shared.errors import SettingsError

T = TypeVar("T", bound=msgspec.Struct)
LogLevel = Literal["debug", "info", "warning", "error"]

# Variables of the whole command rather than of one section.
GLOBAL_VARIABLES = {
    "QUIRE_CONFIG",
    "QUIRE_REDIS_URL",
    "QUIRE_HOME",
    "QUIRE_URL",
    "QUIRE_API_KEY",
    "QUIRE_REQUIRE_DOCKER",
    "QUIRE_DOCKER_PREPARED",
}
MOST = (1 << 63) - 1  # messages carry no larger integer
MOST_MS = 10 * 365 * 86_400_000  # ten years; timers that count nanoseconds, and sums with a clock, take that
HELP_FLAGS = {"--help", "-h"}
SECTIONS = ("cluster", "gateway", "scheduler", "coordinator", "mempool", "keeper", "worker")


def nearest(key: str, known: Sequence[str]) -> str:
    """What to say behind an unknown name: one that is like it, else all."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


def read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """The file's sections. Raises: SettingsError on a missing or malformed file or an unknown section."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error
    for section, body in data.items():
        if section not in SECTIONS and not isinstance(body, dict):
            raise SettingsError(f"{path}: key {section!r} is in no section; sections: {', '.join(SECTIONS)}")
        if section not in SECTIONS:
            raise SettingsError(f"{path}: unknown section [{section}]{nearest(section, SECTIONS)}")
        if not isinstance(body, dict):
            raise SettingsError(f"{path}: {section!r} must be a [section]")
    return data


def parse_flags(argv: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """`--key value` and `--key=value` pairs. Raises: SettingsError on anything else."""
    out: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise SettingsError(f"unexpected argument {word!r}: settings are --key value")
        key, sep, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if key not in known:
            raise SettingsError(f"unknown flag {word.split('=')[0]!r}{nearest(key, known)}".replace("_", "-"))
        if not sep:
            if not rest:
                raise SettingsError(f"flag {word!r} needs a value")
            value = rest.pop(0)
        out[key] = value
    return out


def help_text(cls: type[msgspec.Struct], section: str, about: str) -> str:
    """What `--help` says: what the program does, where settings come from, each flag with its kind and default."""
    rows = [
        (f"--{field.name.replace('_', '-')} {_kind(field.type)}", _default(field))
        for field in msgspec.structs.fields(cls)
    ]
    width = max(len(flag) for flag, _ in rows)
    lines = [f"  {flag:<{width}}  {default}" for flag, default in rows]
    variables, module = f"QUIRE_{section.upper()}_...", cls.__module__.replace(".", "/")
    return (
        f"{about}\n\nFlags win over variables ({variables}), those over section [{section}] of the TOML file that "
        f"QUIRE_CONFIG names.\nWhat each is for: the comments in {module}.py.\n\nsettings, and their defaults:\n"
        + "\n".join(lines)
        + "\n"
    )


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(str(value) or '""' for value in get_args(kind))
    if kind is bool:
        return "true|false"
    return "A,B,..." if get_origin(kind) is list else getattr(kind, "__name__", str(kind)).upper()


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return ",".join(field.default_factory()) or '""'
    if field.default is msgspec.NODEFAULT:
        return "(has to be said)"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return str(field.default) if field.default not in ("", ()) else '""'


def load(
    cls: type[T],
    section: str,
    argv: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
    about: str = "",
) -> T:
    """The effective settings of one section.

    Args:
        cls: frozen msgspec struct; fields of str, int, float, bool, list[str] or Literal types, or None where not said.
        argv: flags only.
        toml_path: None: the file that QUIRE_CONFIG names, if any.
        about: what the program does, for `--help`; "": there is no such flag.
    Raises: SettingsError naming the key and what would work; SystemExit 0 after `--help` or `-h`, on stdout.
    """
    if about and HELP_FLAGS & set(argv):
        sys.stdout.write(help_text(cls, section, about))
        raise SystemExit(0)
    env = os.environ if environ is None else environ  # noqa: TID251  the one reader beside config.py
    known = [f.name for f in msgspec.structs.fields(cls)]
    values: dict[str, Any] = {}
    if toml_path is None and env.get("QUIRE_CONFIG"):
        toml_path = Path(env["QUIRE_CONFIG"])
    if toml_path is not None:
        for key, value in read_toml(toml_path).get(section, {}).items():
            if key not in known:
                raise SettingsError(f"{toml_path}: unknown key [{section}] {key}{nearest(key, known)}")
            values[key] = value
    prefix = f"QUIRE_{section.upper()}_"
    for name, value in env.items():
        if name.startswith(prefix):
            key = name.removeprefix(prefix).lower()
            if key not in known:
                variables = [prefix + each.upper() for each in known]
                raise SettingsError(f"unknown variable {name}{nearest(name, variables)}")
            values[key] = _listed(cls, key, value)
    for key, value in parse_flags(argv, known).items():
        values[key] = _listed(cls, key, value)
    try:
        found = msgspec.convert(values, cls, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        key = text.rpartition("$.")[2].rstrip("`") if "$." in text else "?"
        raise SettingsError(f"setting {section}.{key}: {text}") from error
    for key in known:
        value = getattr(found, key)
        if isinstance(value, list) and "" in value:
            raise SettingsError(
                f"setting {section}.{key}: an entry is empty, as where a variable that was to fill it is not set"
            )
        for each in value if isinstance(value, list) else [value]:
            check_text(f"setting {section}.{key}", each)
            _check_number(f"setting {section}.{key}", each, MOST_MS if key.endswith("_ms") else MOST)
    return found


def check_text(name: str, value: object) -> None:
    """Raises: SettingsError, which does not repeat it, on a string that no file, message or path could hold.

    Flags and variables are any bytes but NUL; those that are no UTF-8 come as lone surrogates.
    """
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
        raise SettingsError(f"{name}: has bytes that are no UTF-8, or a NUL")


def _check_number(name: str, value: object, most: int) -> None:
    """Raises: SettingsError on NaN, which no comparison refuses, and on what no timer or message takes."""
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{name}: {value} is no finite number")
    if isinstance(value, (int, float)) and abs(value) > most:
        raise SettingsError(f"{name}: its value has no room in timers and messages; at most {most}")


def check_share(section: str, name: str, value: float) -> None:
    """Raises: SettingsError unless the value is from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise SettingsError(f"setting {section}.{name}: {value} is not from 0 to 1; try 1")


def _listed(cls: type[msgspec.Struct], key: str, value: str) -> Any:
    """Comma-separated text for list fields; other text is converted by msgspec.

    An empty part stays one: were it dropped, `--api-keys ,` would switch authentication off.
    """
    kind = next(f.type for f in msgspec.structs.fields(cls) if f.name == key)
    if getattr(kind, "__origin__", None) is list:
        return [part.strip() for part in value.split(",")] if value.strip() else []
    return value
