"""The documentation runs."""

import document

import sidelane


def test_the_page_s_code_runs_on_two_ranks():
    assert sidelane.launch(document.run, 2) == [len(document.blocks())] * 2
    assert len(document.blocks()) >= 5
