"""Numbers of a command line that make no sense, refused by the option's name before anything is begun."""

import argparse
import math
from collections.abc import Iterable, Mapping


def check_numbers(
    options: argparse.Namespace,
    least: Mapping[str, float],
    *,
    above_0: Iterable[str] = (),
    endless: str = "slo_",
) -> None:
    """Args: least: what options may be at least; above_0: those that must be more than 0; by their attributes' names.

    No number may be NaN, and none infinite but limits whose name begins with `endless`: nothing is refused by those.
    Raises: ValueError.
    """
    for name, value in vars(options).items():
        if isinstance(value, float) and (
            math.isnan(value) or (math.isinf(value) and not name.startswith(endless))
        ):
            raise ValueError(f"{_flag(name)} {value:g}: a finite number is wanted")
    for name, bound in least.items():
        if (value := getattr(options, name)) < bound:
            raise ValueError(f"{_flag(name)} {value:g}: {bound:g} or more is wanted")
    for name in above_0:
        if not (value := getattr(options, name)) > 0:
            raise ValueError(f"{_flag(name)} {value:g}: more than 0 is wanted")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
