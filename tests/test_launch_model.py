"""The small transformer: the same on every rank and at every place of the sequence, and refused sizes."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringattn import attention
from ringattn.launch import text
from ringattn.launch.model import Config, Norm, Transformer, rotate, rotations
from ringattn.launch.table import plain_lines, print_table

CONFIG = Config(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8)
causal = partial(attention, mask="causal", backend="reference")


def test_equal_seeds_give_equal_weights() -> None:
    first, again, other = (Transformer(CONFIG, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_weights_have_the_deviation_that_is_asked_for() -> None:
    model = Transformer(Config(dim=128, layers=8))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            expected = 0.02 / math.sqrt(16) if name.endswith(("out.weight", "down.weight")) else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.03), name
        else:
            assert (weight == 1).all()


def test_a_change_in_the_future_changes_nothing_before() -> None:
    model = Transformer(CONFIG).double()
    tokens = text.stdlib_text(12).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 7] += 1
    before, after = (model(x, torch.arange(12), causal) for x in (tokens, changed))
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7], after[:, 7])


def test_tokens_know_their_place_by_positions_alone() -> None:
    model = Transformer(CONFIG).double()
    tokens, order = text.stdlib_text(10).unsqueeze(0), torch.randperm(10)

    def everything(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, backend="reference")

    straight = model(tokens, torch.arange(10), everything)
    shuffled = model(tokens[:, order], order, everything)
    torch.testing.assert_close(shuffled, straight[:, order], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(model(tokens[:, order], torch.arange(10), everything), straight[:, order])


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        turned = [rotate(x, rotations(torch.tensor([p]), CONFIG, x.dtype)) for x, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum().item()

    assert score(5, 2) == pytest.approx(score(8195, 8192), abs=1e-10)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_angles_of_far_positions_are_exact_in_float32() -> None:
    positions = torch.tensor([8191, 1_000_003])
    narrow, wide = (rotations(positions, CONFIG, dtype)[1].double() for dtype in (torch.float32, torch.float64))
    assert (narrow - wide).abs().max() < 2**-24


def test_norm_divides_by_the_root_of_the_mean_square() -> None:
    x = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(Norm(32).double()(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


@pytest.mark.parametrize("size", [1, 5000, 3_000_000])
def test_text_is_the_sources_of_the_standard_library(size: int) -> None:
    tokens = text.stdlib_text(size)
    assert tokens.shape == (size,) and tokens.dtype == torch.int64 and 0 <= tokens.min() and tokens.max() < 256
    first = min(Path(text.sysconfig.get_path("stdlib")).glob("*.py")).read_bytes()
    assert bytes(tokens[: len(first)].tolist()) == first[:size]


def test_a_short_library_starts_over_and_an_empty_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match="no Python sources in"):
        text.stdlib_text(4)
    (tmp_path / "b.py").write_text("cd")
    (tmp_path / "a.py").write_text("ab")
    assert bytes(text.stdlib_text(7).tolist()) == b"abcdabc"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, r"heads \(3\) must be a multiple of kv_heads \(2\)"),
        ({"head_dim": 5}, "head_dim must be even for rotary embeddings, got 5"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**sizes)


def test_tables_print_the_same_cells_with_and_without_rich(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("O", "1.00"), ("LSE", "0.98")]
    assert plain_lines([("tensor", "ratio"), *rows]) == ["tensor  ratio", "O        1.00", "LSE      0.98"]
    pytest.importorskip("rich")
    for plain in (True, False):
        print_table("errors", ("tensor", "ratio"), rows, plain=plain)
        printed = capsys.readouterr().out
        assert all(cell in printed for row in rows for cell in row) and "errors" in printed
