"""The comparison of schedules counts what the schedules move, and says why one cannot run."""

import json

import pytest

from ringattn import CAUSAL, FULL
from ringattn.launch import cli
from ringattn.launch.choose import Constants, Shape, candidates, evaluate, timeline
from ringattn.prove import prove

SHAPE = Shape(nodes=2, cards=4, seq_len=8192, heads=32, kv_heads=4, dim=64, itemsize=2, layout="zigzag", band=CAUSAL)
ARGUMENTS = ["plan", "--nodes", "2", "--gpus-per-node", "2", "--seq-len", "4k", "--heads", "8", "--kv-heads", "2"]


@pytest.mark.parametrize("schedule", ["ring", "ring_by_2", "direct", "all_gather"])
def test_bytes_are_those_that_the_schedule_moves(schedule):
    one = evaluate(SHAPE, Constants(), schedule, 1, 0)
    proof = prove(schedule, "zigzag", CAUSAL, (8192,), 8)
    width = 2 * SHAPE.kv_heads * SHAPE.dim
    sent = {"node": [0] * 8, "network": [0] * 8}
    for moved, itemsize in ((proof.moved, 2), (proof.grads_moved, 4)):
        for (rank, peer), tokens in moved.items():
            sent["node" if rank // 4 == peer // 4 else "network"][rank] += tokens * width * itemsize
    for link, ranks in sent.items():
        assert max(ranks) <= one.sent[link] <= 1.5 * max(ranks)  # the worst ranks forward and backward may differ


def test_kernels_take_what_the_rate_says():
    constants = Constants(
        host=1e-12, node_bandwidth=1e30, network_bandwidth=1e30, node_latency=1e-12, network_latency=1e-12
    )
    one = evaluate(SHAPE, constants, "ring", 1, 0)
    pairs = 8192 * 8193 / 2 / 8
    assert one.forward == pytest.approx(4 * pairs * 64 * 32 / constants.forward_rate, rel=1e-3)
    assert one.balance == pytest.approx(1.0)


def test_slow_links_show():
    fast, slow = (evaluate(SHAPE, Constants(network_bandwidth=rate), "ring", 1, 0) for rate in (1e12, 1e8))
    assert slow.forward > 2 * fast.forward


def test_reasons_name_what_would_do():
    found = {(one.schedule, one.heads_degree): one for one in candidates(SHAPE, Constants(), memory=1)}
    assert all("GiB of buffers" in one.reason for one in found.values())
    odd = Shape(1, 4, 64, 6, 3, 8, 2, "zigzag", FULL)
    assert "choose one of [1" in evaluate(odd, Constants(), "ring", 2, 0).reason


def test_the_timeline_is_as_wide_as_it_should_be():
    lines = list(timeline(evaluate(SHAPE, Constants(), "ring", 1, 0)))
    assert lines[1].count("|") == lines[2].count("|") == 8 and "#" in lines[1] and "=" in lines[2]


def test_the_command(tmp_path, capsys):
    picture, constants = tmp_path / "plan.png", tmp_path / "constants.json"
    constants.write_text(json.dumps({"host": 1e-3}))
    assert cli.main([*ARGUMENTS, "--png", str(picture), "--calibration", str(constants)]) == 0
    said = capsys.readouterr().out
    assert "host 0.001" in said and "ring_by_2" in said and "kernels" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_that_fits_is_exit_code_2(capsys):
    assert cli.main([*ARGUMENTS, "--memory", "1e-9"]) == 2
    assert "cannot run: needs" in capsys.readouterr().out


@pytest.mark.parametrize("content", ['{"speed": 1}', '{"host": -1}', '{"host": "fast"}', "["])
def test_bad_constants_are_named(content, tmp_path, capsys):
    path = tmp_path / "constants.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as caught:
        cli.main([*ARGUMENTS, "--calibration", str(path)])
    assert caught.value.code == 2 and "--calibration" in capsys.readouterr().err


def test_heads_that_do_not_divide(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--nodes", "2", "--heads", "7", "--kv-heads", "2"])
    assert "got 7 and 2" in capsys.readouterr().err
