"""`ringattn doctor` says what answers, by trying it, and fails where something does."""

import pytest

from ringattn.launch import cli, doctor


def test_it_says_what_answers(capsys):
    assert cli.main(["doctor", "--no-ranks"]) == 0
    said = capsys.readouterr().out
    assert "torch" in said and "cores" in said and "attention on cpu" in said and "by backend cpu" in said


def test_a_ring_of_two_ranks_is_tried():
    rows = doctor.rings()
    assert rows[0][0][:2] == ("ring of 2 ranks on cpu", "works") and "gloo" in rows[0][0][2]


def test_a_fault_is_an_exit_code_and_a_reason(monkeypatch, capsys):
    def broken(x, backend):
        raise RuntimeError("the wheel is loose")

    monkeypatch.setattr(doctor, "_attend", broken)
    assert doctor.main(["--no-ranks"]) == 1
    assert "RuntimeError: the wheel is loose" in capsys.readouterr().out


def test_unknown_options_are_refused():
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--cure"])
    assert caught.value.code == 2
