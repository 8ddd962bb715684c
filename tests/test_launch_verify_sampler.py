"""`ringattn verify --sampler`: passes on real ranks, and fails where a rank draws something else."""

import pytest

from ringattn.launch import verify_sampler


def test_ranks_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_sampler.main(["--nproc", "2", "--vocab", "1000", "--rows", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(verify_sampler.REQUESTS) and all(line.endswith("equal") for line in lines)


def test_a_difference_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verify_sampler, "_equal", lambda got, expected: False)
    assert verify_sampler.main(["--nproc", "1", "--vocab", "100", "--rows", "1"]) == 1
    assert "differ on ranks [0]" in capsys.readouterr().out


def test_bad_options_are_refused() -> None:
    with pytest.raises(SystemExit):
        verify_sampler.main(["--vocab", "0"])
