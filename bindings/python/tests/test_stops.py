"""Ctrl-C, close, fork, lost ranks: an exception that says what happened, and nobody waits."""

import pytest
import stops

import sidelane

CANCELLED = ("WorldError", "Cancelled", {"by": 0})


def test_ctrl_c_in_a_collective_call_cancels_the_world():
    said = sidelane.launch(stops.interrupted_dispatch, 2)
    assert said[0] == (("KeyboardInterrupt", "", {}), CANCELLED, CANCELLED)
    assert said[1] == (CANCELLED, CANCELLED, CANCELLED)


def test_ctrl_c_while_a_call_starts_leaves_its_objects_usable():
    env = {"SIDELANE_HEAP": "4M", "SIDELANE_SYMMETRIC": "1M"}
    said = sidelane.launch(stops.interrupted_start, 2, env=env)
    assert said[0] == (("KeyboardInterrupt", "", {}), CANCELLED, CANCELLED, [512])
    assert said[1] == CANCELLED


def test_ctrl_c_in_a_meeting_cancels_the_world():
    said = sidelane.launch(stops.interrupted_meeting, 2)
    assert said[0] == (("KeyboardInterrupt", "", {}), CANCELLED)
    assert said[1] == (CANCELLED, CANCELLED)


def test_ctrl_c_in_a_wait_of_a_window_ends_the_wait_alone():
    said = sidelane.launch(stops.interrupted_wait, 2)
    assert said == [(("KeyboardInterrupt", "", {}), 2), (("", "", {}), 2)]


def test_ctrl_c_ends_init():
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert sidelane.launch(stops.interrupted_init, 1, env=env) == [("KeyboardInterrupt", "", {})]


def test_a_closed_world_says_so_and_leaves_its_results():
    for busy, calls, rows, window in sidelane.launch(stops.closed, 2):
        assert busy == ("BusyError", "Busy")
        assert calls == [("ClosedError", "Closed")] * 8
        assert rows == [[1.0] * 4] * 2 and window == [0.0] * 4


def test_a_forked_process_is_told_and_harms_nobody():
    for calls, exitcode, sums, maker in sidelane.launch(stops.forked, 2):
        assert calls[:-1] == [("ForkedError", "Forked", {"maker": maker})] * 5
        assert calls[-1] == ("", "", {}), "close is for the parent to do"
        assert exitcode == 0
        assert sums == [[1.0] * 4] * 2


def test_a_pending_call_that_is_dropped_cancels_the_world():
    assert sidelane.launch(stops.dropped_pending, 2) == [CANCELLED] * 2


def test_a_rank_that_ends_is_named_and_the_others_go_on():
    with pytest.raises(sidelane.RankError) as gone:
        sidelane.launch(stops.ended, 3)
    assert (gone.value.rank, gone.value.exitcode) == (1, 7)
    # What the others saw is beside it.
    for said, (size, epoch, previous), rows in gone.value.results:
        assert said[:2] == ("WorldError", "Lost") and said[2]["rank"] == 1
        assert (size, epoch, previous) == (2, 1, [0, 2])
        assert rows == [[1.0] * 4] * 2
    assert len(gone.value.results) == 2


def test_a_world_takes_a_spare_in_after_growths_that_failed():
    env = {"SIDELANE_HEAP": "16M", "SIDELANE_SYMMETRIC": "4M"}
    said = sidelane.launch(stops.grown, 3, env=env)
    kinds = [[(class_, kind) for class_, kind, _ in errors] for errors, *_ in said]
    failed = ("HeapError", "System")
    assert kinds[0] == [("BootstrapError", "SpareLost"), ("BootstrapError", "NotGrown"), ("WorldError", "Cancelled")]
    assert kinds[1] == [("BootstrapError", "SpareLost"), failed, ("WorldError", "Cancelled")]
    assert kinds[2][:2] == [("BootstrapError", "SettingsDiffer"), failed] and kinds[2][2][0]
    assert said[0][0][0][2]["rank"] == 2 and said[0][0][1][2] == {"rank": 1}
    differs = {"setting": "SIDELANE_HEAP", "seen": str(32 << 20), "expected": str(16 << 20)}
    assert said[2][0][0][2] == differs
    for rank, (_, lonely, world, rows) in enumerate(said):
        assert lonely[:2] == ("BootstrapError", "NoSpare") and lonely[2]["waited"] < 60
        assert world == (rank, 3, [0, 1]) and rows == [[1.0] * 4] * 3


def test_the_error_that_came_first_is_raised():
    with pytest.raises(LookupError, match="had enough") as raised:
        sidelane.launch(stops.raised, 2)
    assert any("rank 1:" in note for note in raised.value.__notes__)


def test_without_a_launcher_it_says_what_to_set(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(sidelane.BootstrapError, match="torchrun") as lost:
        sidelane.init()
    assert lost.value.kind == "NoEnvironment"


def test_an_error_has_its_fields_and_no_others():
    error = sidelane.LaneError("late", "Deadline", {"rank": 1, "waited": 0.5})
    assert (str(error), error.kind, error.rank, error.waited) == ("late", "Deadline", 1, 0.5)
    with pytest.raises(AttributeError, match="LaneError 'Deadline' has no field 'peer'"):
        error.peer
    assert issubclass(sidelane.PlanError, ValueError)
