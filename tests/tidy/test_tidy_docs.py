"""What the documents say is there: links resolve, quoted result files exist, generated parts are current."""

import re
import subprocess
from pathlib import Path

import pytest

from loadtest import readme_table
from loadtest.readme_headlines import HEADLINES
from loadtest.readme_rows import ROWS
from services.coordinator.core import market_table

ROOT = Path(__file__).resolve().parents[2]
NAMES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_every_relative_link_resolves(name):
    path = ROOT / name
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        assert (path.parent / target).exists(), f"{name} links to {target}"


def test_every_claim_names_a_file_that_proves_it():
    claims = (ROOT / "docs" / "claims.md").read_text()
    rows = [line for line in claims.splitlines() if line.startswith("|") and "`" in line]
    assert rows, "docs/claims.md has no claims"
    for row in rows:
        for quoted in re.findall(r"`((?:tests|loadtest)/[^`:\s]+)", row):
            assert (ROOT / quoted).exists(), f"docs/claims.md names {quoted}"


@pytest.mark.parametrize("target", [readme_table.README, readme_table.ALL], ids=lambda path: path.name)
def test_the_figures_in_the_texts_are_those_of_the_result_files(target):
    """`python -m loadtest.readme_table` writes them."""
    between = target.read_text().partition(readme_table.BEGIN)[2].partition(readme_table.END)[0]
    assert between == readme_table.render(target)


def test_every_headline_is_a_row():
    assert {(name, metric) for name, metric, *_ in ROWS} >= HEADLINES


def test_the_table_of_leases_is_the_codes():
    """`python -c "from services.coordinator.core.market_table import as_markdown; print(as_markdown())"` prints it."""
    text = (ROOT / "docs" / "memory-market.md").read_text()
    between = text.partition("<!-- lease table -->\n")[2].partition("<!-- end of lease table -->")[0]
    assert between == market_table.as_markdown()
