"""`make figures`, all of it: ten seconds and more."""

from loadtest.figures.__main__ import SHEETS, main
from loadtest.registry import RESULTS


def test_all_are_drawn_from_the_result_files_alone(tmp_path, capsys):
    assert main([str(RESULTS), str(tmp_path), "--kinds", "svg"]) == 0
    assert {path.stem for path in tmp_path.glob("*.svg")} == {one.name for one in SHEETS}
    said = capsys.readouterr().out
    index = (tmp_path / "index.md").read_text()
    for one in SHEETS:
        there = one.draw is not None and all((RESULTS / f"{name}.json").is_file() for name in one.needs)
        line = next(line for line in said.splitlines() if line.split()[0] == one.name)
        # a file may lack what the figure shows: a workload that was not measured yet, and the line says which
        assert line.endswith(" drawn") or not there or " not measured: no " in line, line
        assert there or not line.endswith(" drawn"), line
        assert f"]({one.name}.svg)" in index
