"""The documentation runs."""

import torch_needed  # noqa: F401

import document

import sidelane


def test_the_page_s_code_runs_on_two_ranks():
    page = "from-python.md"
    assert sidelane.launch(document.run, 2, page) == [len(document.blocks(page))] * 2
    assert len(document.blocks(page)) >= 5
