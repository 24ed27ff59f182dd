"""`quire doctor`: what this machine lacks, each with the fix."""

import json
import sys
from typing import Annotated

import typer
from rich.markup import escape

from deploy.local import config
from deploy.local.doctor_checks import CHECKS, Finding, Verdict, check_vllm_import
from deploy.local.terminal import FAILED, OK, out

MARKS = {Verdict.OK: "[green]ok  [/]", Verdict.WARN: "[yellow]warn[/]", Verdict.FAIL: "[red]FAIL[/]"}


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not import vLLM, which takes 10 s.")] = False,
    port: Annotated[int, typer.Option(help="Of the cluster that is meant, as `quire up --port`.")] = -1,
    base_port: Annotated[int, typer.Option(help="The same.")] = -1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array, for scripts.")] = False,
) -> None:
    """Check this machine for what `quire up` needs. Exit code 1: something necessary is missing."""
    said = {"--port": port, "--base-port": base_port}
    settings = config.load([word for key, value in said.items() if value >= 0 for word in (key, str(value))])
    findings: list[Finding] = []
    checks = [*CHECKS, *([] if quick else [check_vllm_import])]
    for check in checks:
        finding = check(settings)
        findings.append(finding)
        if not as_json:
            out.print(f"{MARKS[finding.verdict]} {finding.what:<12} {escape(finding.found)}", markup=True)
            if finding.fix and finding.verdict is not Verdict.OK:
                out.print(f"       fix: {finding.fix}")
    failed = [f for f in findings if f.verdict is Verdict.FAIL]
    if as_json:
        rows = [{"what": f.what, "verdict": f.verdict, "found": f.found, "fix": f.fix} for f in findings]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    elif failed:
        out.print(f"\n{len(failed)} thing(s) to fix before `quire up` can work")
    else:
        out.print("\nready for `quire up`")
    sys.exit(FAILED if failed else OK)
