"""What figures and tables say of systems and machines is what their result files say; and what cannot be drawn."""

import json
import re

import pytest

from loadtest import readme_table, report
from loadtest.figures import cluster, sheet
from loadtest.figures.__main__ import SHEETS, main
from loadtest.outcomes import Outcome, Run, write_run
from loadtest.readme_rows import ROWS
from loadtest.registry import RESULTS

pytestmark = pytest.mark.slow

REAL = sheet.Results(RESULTS)
GPU = re.compile(r"[HAL]\d{2,3}S?")


def models(*names):
    """Short names of the GPUs that these results were measured on: "H200"."""
    found = [result for name in names if (result := REAL.get(name)) is not None]
    return {model for result in found for card in sheet.cards(result) for model in GPU.findall(card)}


def test_every_curve_of_the_gateways_ttft_is_of_a_system_that_is_named():
    result = REAL.get("gateway-cpu")
    left, _, right = cluster.gateway_cpu(result).axes
    names = [text.get_text() for text in right.get_legend().get_texts()]
    systems = [row["system"] for row in result["samples"] if row["series"] == "ttft"]
    assert len({name.rsplit(",", 1)[0] for name in names}) == len(systems) + 1  # and the bar
    assert sum(name.startswith("no proxy") for name in names) == systems.count("direct") == 1
    assert any(name.startswith("Quire, one stage") for name in names)
    assert "5 ms, the bar for one stage" in names
    assert "half" not in right.get_title()
    assert "Quire,\none stage" in [tick.get_text() for tick in left.get_xticklabels()]
    unknown = {
        **result,
        "samples": [{"series": "ttft", "system": "nginx", "rate_per_s": 1, "ttft_ms": [1.0]}],
    }
    last = cluster.gateway_cpu(unknown).axes[2]
    assert last.get_legend().get_texts()[0].get_text() == "nginx, 1/s"


def test_a_result_of_several_machines_says_the_cards_of_its_samples():
    machine = {"cpu": "cpu", "gpu": ["NVIDIA H100", "NVIDIA H100"]}
    head = {"name": "n", "commit": "c" * 40, "date": "2026-01-01T00", "machine": machine}
    rows = [{"cards": ["NVIDIA H200"]}, {"cards": ["NVIDIA H100"]}, {"cards": ["NVIDIA H200"]}]
    assert (
        sheet.origin({**head, "samples": rows})
        == "n: NVIDIA H200, NVIDIA H100 (by point), cccccccccc, 2026-01-01"
    )
    assert sheet.origin({**head, "samples": [{}]}) == "n: NVIDIA H100, cccccccccc, 2026-01-01"


def test_captions_and_the_readmes_rows_name_the_gpus_that_their_results_have():
    for one in SHEETS:
        if measured := models(*one.needs, *one.also):
            assert set(GPU.findall(one.ours)) <= measured, one.name
    for name, metric, what, *_ in ROWS:
        shown = readme_table.words(what, REAL.get(name)) if REAL.get(name) else ""
        if measured := models(name):
            assert set(GPU.findall(shown)) <= measured, (name, metric)
        assert "{" not in shown


def test_a_result_file_that_cannot_be_read_is_a_placeholder_that_says_so(tmp_path, capsys):
    (tmp_path / "slot-mapping.json").write_text("{")
    (tmp_path / "cluster-footprint.json").write_text("[]")
    words = [
        str(tmp_path),
        str(tmp_path / "out"),
        "--kinds",
        "svg",
        "--only",
        "vattention-12,cluster-footprint",
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "slot-mapping.json is not JSON" in said
    assert "cluster-footprint.json is no result" in said
    assert len(list((tmp_path / "out").iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nonesuch"], "nonesuch"),
        (["--kinds", "xyz"], "xyz"),
        (["--only", "memserve-12,x"], "no figure x"),
    ],
)
def test_figures_and_kinds_that_there_are_not_are_refused(tmp_path, capsys, words, said):
    assert main([str(tmp_path), str(tmp_path / "out"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_made_are_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path), str(tmp_path / "file" / "out"), "--only", "memserve-12"]) == 2
    write_run(tmp_path / "run.jsonl", Run({"name": "r"}, [Outcome(0, "s", 0)]))
    assert report.main([str(tmp_path / "run.jsonl"), "--out", str(tmp_path / "file" / "report")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") and "file" in line for line in lines)


def test_policies_are_drawn_of_whichever_of_their_two_results_is_there(tmp_path):
    (one,) = [one for one in SHEETS if one.name == "memserve-15"]
    assert "no result file locality" in sheet.draw(one, sheet.Results(tmp_path), tmp_path / "out", ["svg"])
    (tmp_path / "locality.json").write_text(json.dumps(REAL.get("locality")))
    assert sheet.draw(one, sheet.Results(tmp_path), tmp_path / "out", ["svg"]) == "drawn"
