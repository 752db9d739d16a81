"""The table of the script for a machine with a GPU: its rows come one by one."""

import sys
from pathlib import Path

import sidelane

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import run
from checking import checks_of


def test_each_row_is_printed_and_in_the_file_as_it_is_added(
    monkeypatch, tmp_path, capsys
):
    table = run.Table(tmp_path / "table.md")
    written = []
    add_row = table.add_row

    def add_and_look(row):
        add_row(row)
        file = (tmp_path / "table.md").read_text().splitlines()
        written.append((file, capsys.readouterr().out.splitlines()))

    monkeypatch.setattr(table, "add_row", add_and_look)
    run.make(table, "checks_numpy", 2)
    names = [check.removeprefix("check_") for check in checks_of("checks_numpy")]
    assert table.code == 0 and len(written) == len(names)
    for row, (name, (file, printed)) in enumerate(zip(names, written, strict=True)):
        assert len(file) == row + 1 and printed == file[-1:], file
        assert printed[0].startswith(f"| {name} | 2 | same bits | "), printed


def test_rows_that_were_made_stay_where_the_processes_end(monkeypatch, capsys):
    made = checks_of("checks_numpy")[0]

    def ends(make_checks, processes, module, address, env):
        from checking import Outcomes

        for rank in range(processes):
            Outcomes(address).send(rank, made, None)
        raise RuntimeError("killed")

    monkeypatch.setattr(sidelane, "launch", ends)
    table = run.Table()
    run.make(table, "checks_numpy", 2)
    first, last = table.lines
    assert "same bits" in first and "**the processes ended**: killed" in last and table.code == 1
    assert capsys.readouterr().out.splitlines() == table.lines
