"""The picture of a plan shows exactly the pairs that the mask lets through, and the bytes that the transport counts."""

import itertools
import random
import subprocess
import sys
from typing import Any

import pytest

from ringattn import CAUSAL, FULL, Band, window
from ringattn.launch import cli, plan
from ringattn.launch.packs import figures, recommend
from ringattn.launch.plan import COLUMNS, ROWS, blocks_picture, make_rank_plans, positions_picture, traffic
from ringattn.layout import LAYOUTS, make_shards, shard_positions, shard_sizes
from ringattn.schedule import SCHEDULES
from ringattn.testing import make_inputs, simulate

MASKS = {"full": FULL, "causal": CAUSAL, "window": window(5, 2), "past": Band(3, 9)}


def shade(seen: list[bool]) -> str:
    return "#" if all(seen) and seen else "+" if any(seen) else "."


@pytest.mark.parametrize(("layout", "mask", "seq_len"), list(itertools.product(LAYOUTS, MASKS, (96, 50))))
def test_pictures_show_what_the_mask_shows(layout: str, mask: str, seq_len: int) -> None:
    world, band = 3, MASKS[mask]
    plans = make_rank_plans(layout, band, (seq_len,), world, "ring", range(world))
    held = [shard_positions(shard) for shard in make_shards(layout, (seq_len,), world)]
    lines = list(blocks_picture(plans, shard_sizes(layout, (seq_len,), world)))[1:]
    for rank in range(world):
        head, *drawn = (line[9:] for line in lines[rank * (ROWS + 1) : (rank + 1) * (ROWS + 1)])
        for number in range(len(plans[rank].schedule.forward)):
            title, step, block = head[number * 12 :][:12].split()
            assert (title, step) == ("step", f"{number}:")
            if block == "-":
                continue
            rows, keys = held[rank], held[int(block)]
            for y, x in itertools.product(range(ROWS), range(COLUMNS)):
                part_rows = rows[y * len(rows) // ROWS : (y + 1) * len(rows) // ROWS]
                part_keys = keys[x * len(keys) // COLUMNS : (x + 1) * len(keys) // COLUMNS]
                expected = shade([band.sees(i, j) for i in part_rows for j in part_keys])
                assert drawn[y][number * 12 :][x] == expected, (rank, block, y, x)


@pytest.mark.parametrize(("layout", "seq_len"), list(itertools.product(LAYOUTS, (5, 64, 150))))
def test_positions_are_those_of_the_layout(layout: str, seq_len: int) -> None:
    plans = make_rank_plans(layout, FULL, (seq_len,), 4, "ring", range(4))
    lines = list(positions_picture(plans, seq_len))[1:]
    for line, shard in zip(lines, make_shards(layout, (seq_len,), 4), strict=True):
        held, width = set(shard_positions(shard)), min(64, seq_len)
        cells = [[p in held for p in range(seq_len) if p * width // seq_len == x] for x in range(width)]
        assert line[9:] == "".join(map(shade, cells))


@pytest.mark.parametrize(("layout", "schedule", "mask"), list(itertools.product(LAYOUTS, SCHEDULES, MASKS)))
def test_bytes_are_those_that_the_transport_counts(layout: str, schedule: str, mask: str) -> None:
    q, k, v, do = make_inputs(heads=2, kv_heads=1, tokens=50, dim=4)
    ran = simulate(q, k, v, do, world=3, layout=layout, mask=MASKS[mask], schedule=schedule)
    plans = make_rank_plans(layout, MASKS[mask], (50,), 3, schedule, range(3))
    sizes = shard_sizes(layout, (50,), 3)
    sent = [traffic(plan.schedule, sizes, 2 * 4, 4) for plan in plans]
    assert sent == list(zip(ran.sent_forward, ran.sent_backward, strict=True))


def test_the_command_prints_the_whole_world(capsys: Any) -> None:
    assert cli.main(["plan", "--world", "4", "--layout", "zigzag", "--mask", "causal"]) == 0
    text = capsys.readouterr().out
    assert "rank 3   step 0: 3   step 1: 2   step 2: 1   step 3: 0" in text
    assert "busiest rank computes 1.00 times the mean" in text
    assert "0       1024         4  2097664  25.0%  12.0 MiB  44.0 MiB" in text  # 3 |KV|, 3 |KV| + 4 |dKV|


def test_one_rank_is_shown_step_by_step(capsys: Any) -> None:
    assert cli.main(["plan", "--rank", "1", "--mask", "window:700", "--layout", "contiguous"]) == 0
    text = capsys.readouterr().out
    assert "step 0: sends 1 to 2; gets 0 from 0; computes on 1" in text
    assert "queries 0:1024 x keys 0:1024 where 0 <= a - b <= 700" in text
    assert "rank 2 " not in text


@pytest.mark.parametrize("arguments", [["--world", "64"], ["--world", "4", "--seq-len", "2"], ["--world", "1"]])
def test_any_world_and_length_has_a_picture(arguments: list[str], capsys: Any) -> None:
    assert plan.main(arguments) == 0 and "balance" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "0"], "world must be at least 1, got 0"),
        (["--rank", "4"], r"rank must be in \[0, 4\), got 4"),
        (["--seq-len", "0"], "seq_len must be at least 1, got 0"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan.main(arguments)
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)


def test_commands_are_listed_and_unknown_ones_refused(capsys: Any) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in cli.COMMANDS)
    assert cli.main(["fly"]) == 2 and cli.main([]) == 2
    assert "unknown command 'fly'; choose one of verify, plan" in capsys.readouterr().err


def test_a_module_is_a_command_too() -> None:
    command = [sys.executable, "-m", "ringattn.launch.plan", "--world", "2"]
    assert "rank 1 " in subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def test_documents_are_compared_and_the_schedule_is_proven(tmp_path, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("0 300 310, 311\n1000 4096")
    assert (
        cli.main(["plan", "--documents", str(lengths), "--layout", "balanced", "--schedule", "direct", "--prove"]) == 0
    )
    said = capsys.readouterr().out
    assert "4096 tokens on 4 ranks" in said and "5 documents of 1 to 3096 tokens" in said
    assert said.count("recommended") == 1 and "proven for all 4 ranks" in said


@pytest.mark.parametrize("text", ["12 x", "3 0 4", "", "1.5"])
def test_a_file_without_lengths_is_refused(text, tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "--documents", str(path)])
    assert caught.value.code == 2 and "--documents" in capsys.readouterr().err


def test_the_recommended_layout_is_even_and_moves_least():
    draw = random.Random(0)
    lengths = tuple(min(6000, max(1, int(draw.lognormvariate(7, 1.2)))) for _ in range(40))
    found = {layout: figures(layout, CAUSAL, lengths, 8) for layout in LAYOUTS}
    best = recommend(list(found.values()))
    assert best.layout == "balanced" and best.work < 1.1
    assert recommend([found["contiguous"], found["zigzag"]]).work == min(found["contiguous"].work, found["zigzag"].work)
