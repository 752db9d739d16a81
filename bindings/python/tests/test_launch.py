"""Ranks that ``sidelane.launch`` starts: which functions, which counts, whose error."""

import os
import subprocess
import sys

import pytest

import sidelane

QUICK = {"SIDELANE_RENDEZVOUS_MS": "2000"}


def fails_before_it_joins():
    if os.environ["RANK"] == "1":
        raise KeyError("one of the caller's")
    sidelane.init()


def test_error_of_a_rank_precedes_its_consequences():
    with pytest.raises(KeyError, match="one of the caller's"):
        sidelane.launch(fails_before_it_joins, 2, env=QUICK)


@pytest.mark.parametrize("ranks", [0, -1])
def test_number_of_ranks_is_positive(ranks):
    with pytest.raises(ValueError, match=f"ranks is {ranks}: expected at least 1"):
        sidelane.launch(len, ranks)


def test_number_of_ranks_is_an_integer():
    with pytest.raises(TypeError, match="ranks is '3': expected an integer"):
        sidelane.launch(len, "3")


def test_function_of_a_notebook_travels_by_value():
    # As in a notebook, the function is in no file.
    said = subprocess.run([sys.executable, "-"], input=NOTEBOOK, text=True, capture_output=True, timeout=120)
    assert said.stdout == "[(0, 6), (1, 6)]\n", said.stderr


NOTEBOOK = """
import sidelane

offset = 3

def rank():
    world = sidelane.init()
    return world.rank, world.size + offset + 1

print(sidelane.launch(rank, 2))
"""
