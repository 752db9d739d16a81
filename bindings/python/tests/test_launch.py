"""Ranks that ``sidelane.launch`` starts: which functions, which counts, whose error."""

import os
import socket
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


def join_twice():
    with sidelane.init():
        try:
            sidelane.init()
        except sidelane.BootstrapError as error:
            return error.kind, str(error)
    return None


def test_second_join_of_a_job_says_what_to_do():
    (kind, message), *others = sidelane.launch(join_twice, 2, env=QUICK | {"SIDELANE_PORT": str(free_port())})
    assert kind == "NoPort" and "SIDELANE_PORT" in message and "once" in message
    assert all(other is not None for other in others)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_misspelt_variable_is_named_with_the_one_that_is_meant():
    with pytest.raises(sidelane.BootstrapError, match="SIDELANE_NETT is no variable of Sidelane") as refused:
        sidelane.launch(sidelane.init, 1, env=QUICK | {"SIDELANE_NETT": "tcp"})
    assert (refused.value.kind, refused.value.near) == ("MisspeltVariable", "SIDELANE_NET")


def join_in_a_forked_child():
    with sidelane.init():
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                sidelane.init()
                said = "joined"
            except sidelane.Error as error:
                said = type(error).__name__
            os.write(writes, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        return os.read(reads, 100).decode()


def test_join_in_a_forked_child_is_refused_as_forked():
    assert sidelane.launch(join_in_a_forked_child, 1) == ["ForkedError"]


def test_heap_without_room_for_rows_is_refused():
    with pytest.raises(sidelane.BootstrapError, match="SIDELANE_HEAP.*no room for rows.*SIDELANE_SYMMETRIC") as error:
        sidelane.launch(sidelane.init, 1, env={"SIDELANE_HEAP": "32M"})
    assert error.value.kind == "NoRoomForRows"


NOTEBOOK = """
import sidelane

offset = 3

def rank():
    world = sidelane.init()
    return world.rank, world.size + offset + 1

print(sidelane.launch(rank, 2))
"""
