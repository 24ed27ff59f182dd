"""Fill the README's figures from training_log.json: `python -m deploy.models.describe`.

Everything between the two marker lines is replaced, so no figure in the README is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def render(log: dict[str, Any], folder: Path) -> str:
    """The README's section on one training run: a table, the loss curve and the samples."""
    size_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    last = log["curve"][-1] if log["curve"] else {"train_loss": float("nan"), "held_out_loss": float("nan")}
    rows = (
        ("command", f"`{log['command']}`"),
        ("machine", f"{log['machine']}, torch {log['torch']}, Python {log['python']}"),
        ("seed", log["seed"]),
        ("parameters", f"{log['parameters']:,}"),
        ("corpus", f"{log['corpus_tokens']:,} tokens"),
        ("trained on", f"{log['tokens_seen']:,} tokens in {log['steps']:,} steps, {log['seconds']} s"),
        ("final loss", f"{last['train_loss']} train, {last['held_out_loss']} held out (nats per token)"),
        ("largest logit difference from transformers", _difference(log)),
        ("folder", f"{size_bytes / 1e6:.2f} MB"),
    )
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += ["| step | seconds | train loss | held-out loss |", "|---|---|---|---|"]
    curve = log["curve"]
    for entry in curve[:: max(1, len(curve) // 10)]:
        lines.append(
            f"| {entry['step']} | {entry['seconds']} | {entry['train_loss']} | {entry['held_out_loss']} |"
        )
    lines += ["", "Greedy answers:", ""]
    for pair in log["samples"]:
        answer = " ".join(pair["answer"].split())
        lines.append(f"- **{pair['prompt']}** {answer[:300]}")
    return "\n".join(lines)


def replace_figures(readme: str, figures: str) -> str:
    """The README with the text between its markers replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"the README lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def _difference(log: dict[str, Any]) -> str:
    value = log["logit_difference_from_transformers"]
    return "not measured" if value is None else f"{value:.1e} (float32)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill the README's figures from training_log.json.")
    parser.add_argument("--model", type=Path, default=Path("deploy/models/quire-demo"))
    parser.add_argument("--readme", type=Path, default=Path("deploy/models/README.md"))
    args = parser.parse_args()
    log = json.loads((args.model / "training_log.json").read_text("utf-8"))
    text = replace_figures(args.readme.read_text("utf-8"), render(log, args.model))
    args.readme.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
