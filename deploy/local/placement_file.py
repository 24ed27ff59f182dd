"""The file of `quire place`: servers and models in TOML or JSON, models also by the file that `quire profile` saved.

[[servers]]
name = "h100"                    # h100/0, h100/1, ... where there are several
gpus = 8
gpu_memory_bytes = "80 GB"       # a number of bytes, or text with a unit
count = 16
[[models]]
model = "llama-8b"
tp = 1
bytes_per_gpu = "25 GB"          # that each GPU lends; below 0: needs
role = "producer"                # or consumer, neutral; without it the sign says it
count = 3                        # or the ids of running ones: instances = ["decode-0", "decode-1"]
page_bytes = "2 MiB"             # if known: of KV memory on one GPU (`page_bytes` of its space, mempool's /status)
[[models]]
profile = "opt.json"             # model, role, tp and bytes_per_gpu from there
count = 2
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared import json_text
from shared.errors import SettingsError
from shared.wire.placer import PlacementQuestion, PlacerModel, PlacerServer

MOST_FILE_BYTES = 16 << 20
TABLES = ("servers", "models")
PROFILE_KEYS = ("model", "role", "tp", "bytes_per_gpu")
SIZES = ("gpu_memory_bytes", "bytes_per_gpu", "page_bytes")
MOST_BYTES = 1 << 50  # no GPU has a pebibyte; sums are counted in 64 bits
UNITS = {"": 0, "b": 0, "kb": 3, "mb": 6, "gb": 9, "tb": 12}
BINARY_UNITS = {"kib": 10, "mib": 20, "gib": 30, "tib": 40}
SIZE = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")

Entry = TypeVar("Entry", PlacerServer, PlacerModel)


def read(path: Path, *, time_limit_ms: int) -> PlacementQuestion:
    """The question in a file. Raises: SettingsError that names the file, the entry and what would be right."""
    data = _load(path, " and ".join(TABLES))
    if all(key in data for key in PROFILE_KEYS):
        raise SettingsError(
            f"{path} is one model's profile: name it in a file with [[servers]] and [[models]], "
            f'as profile = "{path.name}" (docs/memory-market.md has an example)'
        )
    _known(f"{path}", data, TABLES)
    servers = [
        _entry(path, "servers", n, item, PlacerServer) for n, item in enumerate(_rows(path, data, "servers"))
    ]
    models = [
        _entry(path, "models", n, _with_profile(path, n, item), PlacerModel)
        for n, item in enumerate(_rows(path, data, "models"))
    ]
    return PlacementQuestion(servers=servers, models=models, time_limit_ms=time_limit_ms)


def _load(path: Path, keys: str) -> dict[str, Any]:
    """Args: keys: that are expected, in words."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_FILE_BYTES + 1)
        if len(raw) > MOST_FILE_BYTES:
            raise SettingsError(f"{path} has more than {MOST_FILE_BYTES >> 20} MiB")
        text = raw.decode()
        found = json_text.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise SettingsError(f"{path} is nested too deeply") from error
    except ValueError as error:  # of either format, and of what is no text
        kind = "JSON" if path.suffix == ".json" else "TOML (JSON is called .json)"
        raise SettingsError(f"{path} is not {kind}: {error}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{path} has to be an object with {keys}")
    return found


def _rows(path: Path, data: dict[str, Any], table: str) -> list[dict[str, Any]]:
    rows = data.get(table)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise SettingsError(f"{path} needs [[{table}]] entries")
    return rows


def _with_profile(path: Path, number: int, item: dict[str, Any]) -> dict[str, Any]:
    """An entry with what its profile says; its own keys go before the profile's."""
    if "profile" not in item:
        return item
    named = item["profile"]
    if not isinstance(named, str) or not Path(named).name:
        raise SettingsError(f"{path}: models[{number}].profile is the name of a file")
    keys = f"{', '.join(PROFILE_KEYS)}, as `quire profile` saves it"
    profile = _load(_profile_file(path.parent / named), keys)
    missing = [key for key in PROFILE_KEYS if key not in profile]
    if missing:
        raise SettingsError(f"{path}: models[{number}].profile {named!r} lacks {', '.join(missing)}")
    rest = {key: value for key, value in item.items() if key != "profile"}
    return {**{key: profile[key] for key in PROFILE_KEYS}, **rest}


def _profile_file(named: Path) -> Path:
    """With `.json` where that was left out: `opt-1.3b` has no suffix, whatever pathlib says."""
    if named.suffix in (".json", ".toml") or os.path.isfile(named):
        return named
    return named.with_name(f"{named.name}.json")


def _entry(path: Path, table: str, number: int, item: dict[str, Any], cls: type[Entry]) -> Entry:
    where = f"{path}: {table}[{number}]"
    fields = [field.name for field in msgspec.structs.fields(cls)]
    _known(where, item, [*fields, "profile"] if cls is PlacerModel else fields)
    values = {key: _bytes(f"{where}.{key}", value) if key in SIZES else value for key, value in item.items()}
    if cls is PlacerModel:
        values = _with_role(where, values)
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        key = str(error).rpartition("$.")[2].rstrip("`") if "$." in str(error) else ""
        text = str(error).partition(" - at")[0]
        raise SettingsError(f"{where}{'.' + key if key else ''}: {text}") from error


def _with_role(where: str, values: dict[str, Any]) -> dict[str, Any]:
    """A profile's signed bytes (R_m of AQUA 5) as a role and a size; the two may not contradict each other."""
    size = values.get("bytes_per_gpu", 0)
    by_sign = "producer" if size > 0 else "consumer" if size < 0 else "neutral"
    role = values.get("role", by_sign)
    if size < 0 and role != "consumer":
        raise SettingsError(
            f"{where}.bytes_per_gpu: what is below 0 is needed, and role is {role!r}, not 'consumer'"
        )
    named = values.get("instances")
    count = {"count": len(named)} if isinstance(named, list) and named and "count" not in values else {}
    return {**values, **count, "role": role, "bytes_per_gpu": abs(size)}


def _known(where: str, item: dict[str, Any], known: Iterable[str]) -> None:
    for key in item:
        if key not in known:
            close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
            raise SettingsError(f"{where}: unknown key {key!r}; {hint}")


def _bytes(where: str, value: Any) -> int:
    """A count of bytes, from a number or from text with a unit."""
    size = _size(value)
    if size is None:
        raise SettingsError(
            f"{where}: {value!r} is no size; use a number of bytes or text such as '25 GB' or '-24 GiB'"
        )
    if not -MOST_BYTES <= size <= MOST_BYTES:
        raise SettingsError(f"{where}: more than 2^50 bytes, a pebibyte, are of no GPU")
    return round(size)


def _size(value: Any) -> float | None:
    """Infinite where it has hundreds of digits; None: it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():  # 80e9 is one to TOML and JSON
        return value
    if isinstance(value, str) and (found := SIZE.fullmatch(value.strip())):
        number, unit = float(found[1]), found[2].lower()
        if unit in UNITS:
            return number * 10 ** UNITS[unit]
        if unit in BINARY_UNITS:
            return number * 2 ** BINARY_UNITS[unit]
    return None
