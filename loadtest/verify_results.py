"""`make verify-results`: does every quoted figure still follow from its samples, its script and its commit?

python -m loadtest.verify_results [FOLDER]      exit status 1 when a file fails
"""

import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.registry import MEASURES, RESULTS, ROOT
from loadtest.results import check_metrics, git, load_result

FIELDS = ("name", "claim", "script", "command", "commit", "date", "machine", "settings", "metrics", "samples")
RELATIVE_TOLERANCE = 1e-9


def problems_of(path: Path, *, root: Path = ROOT) -> list[str]:
    """What is wrong with one result file; [] when it may be quoted."""
    try:
        result = load_result(path)
    except ValueError as error:
        return [str(error)]
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
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
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
    folder = Path(argv[0]) if argv else RESULTS
    num_bad = 0
    paths = sorted(folder.glob("*.json"))
    for path in paths:
        wrong = problems_of(path)
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
