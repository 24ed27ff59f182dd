"""`make verify-results`: does every quoted figure still follow from its samples, its script and its commit?

python -m loadtest.verify_results [FOLDER]      exit status 1 when a file fails, 2 without such a folder
"""

import argparse
import importlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.registry import MEASURES, RESULTS, ROOT
from loadtest.results import check_metrics, git, load_result

FIELDS = ("name", "claim", "script", "command", "commit", "date", "machine", "settings", "metrics", "samples")
RELATIVE_TOLERANCE = 1e-9
# What a file raises whose fields are not what they should be: it fails, and the others are checked.
NO_RESULT = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, TypeError, ValueError)


def problems_of(path: Path, *, root: Path = ROOT) -> list[str]:
    """What is wrong with one result file; [] when it may be quoted, and nothing is `uncommitted`."""
    try:
        result = load_result(path)
    except ValueError as error:
        return [str(error)]
    except NO_RESULT as error:
        return [f"is no result file: {error!r}"]
    try:
        return _problems(result, path, root)
    except NO_RESULT as error:
        return [f"cannot be checked: {error!r}"]


def uncommitted(path: Path) -> list[str]:
    """Of a file that was measured with changes that no commit has: what was measured is not known."""
    try:
        is_dirty = json.loads(path.read_text()).get("dirty", True) is not False
    except NO_RESULT:
        return []  # problems_of says it
    return ["was measured with changes that are in no commit (dirty): measure again"] if is_dirty else []


def _problems(result: dict[str, Any], path: Path, root: Path) -> list[str]:
    missing = [field for field in FIELDS if field not in result]
    if missing:
        return [f"lacks {', '.join(missing)}"]
    if result["name"] != path.stem:
        return [f"is named {result['name']!r}"]
    if result["name"] not in MEASURES:
        return [f"nothing measures {result['name']!r}: loadtest/registry.py does not know it"]
    wrong = check_metrics(result["metrics"])
    wrong += _recompute(MEASURES[result["name"]], result["metrics"], result["samples"])
    return wrong + _provenance(result["commit"], result["script"], root)


def _recompute(module: str, metrics: dict[str, float], samples: list[dict[str, Any]]) -> list[str]:
    try:
        again = importlib.import_module(module).metrics_from_samples(samples)
    except NO_RESULT as error:
        return [f"{module}.metrics_from_samples fails on its samples: {error!r}"]
    wrong = [f"metric {key!r} does not come from the samples" for key in metrics.keys() - again.keys()]
    wrong += [f"metric {key!r} is missing" for key in again.keys() - metrics.keys()]
    for key in metrics.keys() & again.keys():
        if not math.isclose(metrics[key], again[key], rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12):
            wrong.append(f"metric {key!r} is {metrics[key]}, its samples say {again[key]}")
    return wrong


def _provenance(commit: str, script: str, root: Path) -> list[str]:
    if git(root, "rev-parse", "HEAD") is None:
        return []  # an unpacked archive: nothing to compare with
    if not commit or git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        shallow = git(root, "rev-parse", "--is-shallow-repository") == "true"
        return [f"commit {commit or '(none)'} is not here{': fetch the whole history' if shallow else ''}"]
    if git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        return [f"commit {commit[:12]} is no ancestor of HEAD"]
    if git(root, "diff", "--quiet", commit, "--", script) is None:
        return [f"{script} has changed since commit {commit[:12]}: measure again"]
    return []


def strays(folder: Path) -> list[str]:
    """Names of files with samples that no result file of `folder` names: a merge or a hand left them behind."""
    owners = {path: folder / path.name.removesuffix(".xz") for path in sorted((folder / "samples").glob("*"))}
    return [
        path.name
        for path, owner in owners.items()
        if not owner.is_file() or f'"samples/{path.name}"' not in owner.read_text()
    ]


def main(argv: Sequence[str]) -> int:
    """Check every newest result file; history/ is kept as it was."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS)
    folder: Path = parser.parse_args(argv).folder
    if not folder.is_dir():
        print(f"error: {folder} is no folder", file=sys.stderr)
        return 2
    num_bad = 0
    paths = sorted(folder.glob("*.json"))
    for path in paths:
        wrong = problems_of(path) + uncommitted(path)
        num_bad += bool(wrong)
        print(f"{'FAIL' if wrong else 'ok  '} {path.name}")
        for text in wrong:
            print(f"     {text}")
    left = strays(folder)
    for name in left:
        print(f"FAIL samples/{name}\n     belongs to no result file")
    print(f"{len(paths)} result files, {num_bad} bad")
    return 1 if num_bad or left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
