"""Nothing is lost, nobody hangs, the guilty rank is named: a fault of each kind here, all of them by `make faults`."""

from pathlib import Path

import harness
import pytest
from harness import Fault, Outcome


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = harness.run(tmp_path_factory.mktemp("undisturbed"))
    assert set(outcome.codes.values()) == {0} and len(outcome.reports) == harness.WORLD
    return outcome


@pytest.mark.parametrize("fault", harness.sample(), ids=str)
def test_a_fault(fault: Fault, undisturbed: Outcome, tmp_path: Path) -> None:
    outcome = harness.run(tmp_path, fault)
    assert harness.judge(fault, outcome, undisturbed) == "ok", outcome


def test_a_lost_store_alone_harms_nothing(undisturbed: Outcome, tmp_path: Path) -> None:
    fault = Fault("slow", 1)
    outcome = harness.run(tmp_path, fault, kill_store=True)
    assert harness.judge(fault, outcome, undisturbed) == "ok", outcome


def test_a_rank_that_dies_with_the_store_is_named_by_its_neighbours(undisturbed: Outcome, tmp_path: Path) -> None:
    """Those that are farther away name the neighbour that left because of it."""
    fault = Fault("kill", 2, "forward", 1)
    outcome = harness.run(tmp_path, fault, kill_store=True)
    assert harness.judge(fault, outcome, undisturbed) in ("ok", "unnamed"), outcome
    assert any(report["culprit"] == 2 for report in outcome.reports.values()), outcome
