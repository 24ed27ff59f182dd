"""Write the demo model's corpus: `python -m deploy.models.build_corpus --out .quire/train`.

Two files: `documents.jsonl` ({"text"}) and `chats.jsonl` ({"messages", "tools"}). All text comes from the
running Python's standard library (docstrings, language reference; PSF-2.0) or from this folder's templates.
Same Python version and same seed, same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from deploy.models import chats_library, chats_tools
from deploy.models.stdlib_facts import Fact, Topic, read_facts, read_topics

Row = dict[str, object]


def build_documents(facts: list[Fact], topics: list[Topic]) -> Iterable[Row]:
    """One document per module (its docstring, then its names), one per chapter of the language reference."""
    by_module: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        by_module[fact.module].append(fact)
    for module, members in by_module.items():
        parts = [f"Module {module}"]
        for fact in members:
            heading = f"{fact.kind} {fact.call or fact.name}\n" if fact.kind != "module" else ""
            parts.append(heading + fact.doc)
        yield {"text": "\n\n".join(parts)}
    for topic in topics:
        yield {"text": "\n\n".join([topic.title, *topic.paragraphs])}


def build_chats(facts: list[Fact], topics: list[Topic], rng: random.Random) -> list[Row]:
    """Every chat, shuffled."""
    plain = [
        *chats_library.about_facts(facts, rng),
        *chats_library.about_topics(topics, rng),
        *chats_library.small_talk(rng, repeats=30),
        *chats_library.conversations(facts, rng, count=3000),
    ]
    rows = [Row(messages=chat, tools=None) for chat in plain]
    rows += [Row(messages=chat, tools=tools) for chat, tools in chats_tools.tool_chats(facts, rng, 5000)]
    rng.shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo model's corpus.")
    parser.add_argument("--out", type=Path, default=Path(".quire/train"))
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    facts, topics = read_facts(), read_topics()
    rng = random.Random(args.seed)
    for name, rows in (
        ("documents", list(build_documents(facts, topics))),
        ("chats", build_chats(facts, topics, rng)),
    ):
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        print(f"{path}: {len(rows)} rows, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
