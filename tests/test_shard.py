"""Sharding is the inverse of unsharding, forward and backward, in one process and over gloo."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringattn.launch.spawn import run
from ringattn.layout import LAYOUTS, make_shards, shard_positions
from ringattn.shard import _cut, _gather, _reduce, _spread, _tie, positions, shard, shard_batch, tie, unshard

LENGTHS = (0, 1, 2, 7, 12)
GRID = list(itertools.product(LAYOUTS, LENGTHS))


def whole(seq_len: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A non-contiguous (3, S, 2) tensor that is the same on every rank."""
    return torch.randn(2, seq_len, 3, dtype=dtype, generator=torch.Generator().manual_seed(seq_len)).transpose(0, 2)


def held(seq_len: int, layout: str, group: dist.ProcessGroup | None = None) -> list[int]:
    """Global positions of this rank by the layout's definition."""
    return shard_positions(make_shards(layout, (seq_len,), dist.get_world_size(group))[dist.get_rank(group)])


def check_round_trip() -> None:
    for layout, seq_len in GRID:
        x = whole(seq_len)
        local = shard(x, 1, layout=layout)
        where = held(seq_len, layout)
        assert torch.equal(local, x[:, where]) and local.is_contiguous(), (layout, seq_len)
        assert positions(seq_len, layout=layout).tolist() == where
        again = unshard(local.transpose(0, 2).contiguous().transpose(0, 2), -2, layout=layout, seq_len=seq_len)
        assert torch.equal(again, x) and again.is_contiguous(), (layout, seq_len)
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        x = torch.arange(7).to(dtype)
        assert torch.equal(unshard(shard(x, 0), 0, seq_len=7), x)
    equal = shard(whole(12), 1, layout="headtail")
    assert torch.equal(unshard(equal, 1, layout="zigzag"), whole(12))


def check_gradients() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for layout, seq_len in GRID:
        x = whole(seq_len).requires_grad_()
        local = shard(x, 1, layout=layout)
        grad = whole(seq_len + 1)[:, 1:] * 1.5
        (sliced,) = torch.autograd.grad(unshard(local, 1, layout=layout, seq_len=seq_len), local, grad)
        assert torch.equal(sliced, shard(grad, 1, layout=layout)), (layout, seq_len)
        full = unshard(local, 1, layout=layout, seq_len=seq_len, grad="sum")
        (summed,) = torch.autograd.grad(full, local, grad * (rank + 1), retain_graph=True)
        expected = shard(grad * (world * (world + 1) / 2), 1, layout=layout)
        torch.testing.assert_close(summed, expected, rtol=1e-14, atol=0)
        full.backward(grad * (rank + 1))
        outside = torch.ones(seq_len, dtype=torch.bool)
        outside[held(seq_len, layout)] = False
        assert not x.grad[:, outside].any()
        torch.testing.assert_close(shard(x.grad, 1, layout=layout), expected, rtol=1e-14, atol=0)


def check_16_bit_sum() -> None:
    # bf16 sums of 1 + 2^-8 three times lose the small part; a float32 sum rounds once.
    local = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    grads = [1.0, 2.0**-8, 2.0**-8]
    unshard(local, 0, grad="sum").backward(torch.full((9,), grads[dist.get_rank()], dtype=torch.bfloat16))
    assert local.grad.dtype == torch.bfloat16
    assert local.grad.tolist() == [1 + 2.0**-7] * 3


def model_gradients(kind: str, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and parameter gradients of a model that mixes tokens, summed over ranks as the convention says."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    seq_len, weights = 11, {"inner": draw(4, 4).requires_grad_(), "head": draw(4, 4).requires_grad_()}
    x, targets = draw(2, seq_len, 4), draw(2, seq_len, 4)
    world = 1 if kind == "single" else dist.get_world_size()
    hidden = x if kind == "single" else shard(x, 1, layout=layout)
    hidden = (hidden @ weights["inner"]).tanh()
    if kind != "single":
        hidden = unshard(hidden, 1, None, layout, seq_len, grad="slice" if kind == "slice" else "sum")
    mixed = hidden.cumsum(1)
    if kind == "local":
        mixed, targets = shard(mixed, 1, layout=layout), shard(targets, 1, layout=layout)
    loss = (mixed @ weights["head"] - targets).square().sum() / seq_len
    if kind == "replicated":
        loss = loss / world
    loss.backward()
    total, grads = loss.detach(), {name: weight.grad for name, weight in weights.items()}
    for name, value in {"loss": total, **grads}.items():
        if world > 1 and (kind != "slice" or name == "inner"):
            dist.all_reduce(value)
    return total, grads


def check_convention() -> None:
    loss, grads = model_gradients("single", "contiguous")
    for layout, kind in itertools.product(LAYOUTS, ("replicated", "slice", "local")):
        found_loss, found = model_gradients(kind, layout)
        assert abs(found_loss - loss) <= 1e-13 * loss, (layout, kind)
        for name, grad in grads.items():
            assert (found[name] - grad).norm() <= 1e-13 * grad.norm(), (layout, kind, name)


def check_tie() -> None:
    # Without tie, the ranks that never touch `full` would leave the others waiting in the reduce-scatter.
    local = torch.full((2,), 3.0, requires_grad=True)
    full = unshard(local, 0, grad="sum")
    loss = full[:2].square().sum() if dist.get_rank() == 0 else torch.zeros(())
    tied = tie(loss, full)
    assert torch.equal(tied, loss)
    tied.backward()
    assert local.grad.tolist() == ([6.0, 6.0] if dist.get_rank() == 0 else [0.0, 0.0])


def check_sub_group() -> None:
    group = dist.new_group([1, 3])  # first, so that ranks of one mesh dimension are in different numbers of groups
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    x = whole(7)
    local = shard(x, 1, mesh["cp"], "zigzag")
    assert torch.equal(unshard(local, 1, mesh["cp"], "zigzag", seq_len=7), x)
    with pytest.raises(ValueError, match="one-dimensional mesh.*pass a slice"):
        shard(x, 1, mesh)
    if dist.get_rank() in (1, 3):
        local = shard(x, 1, group, "striped")
        assert torch.equal(local, x[:, held(7, "striped", group)])
        assert torch.equal(unshard(local, 1, group, "striped", seq_len=7), x)
    else:
        with pytest.raises(ValueError, match="this rank is not in it"):
            shard(x, 1, group)


def check_compiled() -> None:
    def step(x: Tensor) -> Tensor:
        local = shard(x, 1, layout="zigzag")
        full = unshard(local.sin(), 1, layout="zigzag", seq_len=x.size(1), grad="sum")
        return tie(full.square().sum() * 0.5, local)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x = whole(9).requires_grad_()
        loss = function(x)
        loss.backward()
        results.append((loss.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def check_opcheck() -> None:
    name = dist.group.WORLD.group_name
    for layout, seq_len in (("zigzag", 7), ("striped", 1)):
        x = whole(seq_len)
        local = shard(x, 1, layout=layout)
        for op, argument in ((_cut, x), (_spread, local), (_reduce, x)):
            torch.library.opcheck(op, (argument.requires_grad_(), 1, layout, [seq_len], name))
        for sum_grads in (False, True):
            torch.library.opcheck(_gather, (local.requires_grad_(), 1, layout, [seq_len], name, sum_grads))


def check_documents() -> None:
    lengths, x = (3, 1, 8), whole(12)
    for layout in LAYOUTS:
        spans = make_shards(layout, lengths, dist.get_world_size())[dist.get_rank()]
        where = shard_positions(spans)
        local = shard(x, 1, layout=layout, documents=lengths)
        assert torch.equal(local, x[:, where])
        assert positions(12, layout=layout, documents=[0, 3, 4, 12]).tolist() == where
        assert torch.equal(unshard(local, 1, layout=layout, documents=torch.tensor(lengths)), x)
        batch = shard_batch({"input_ids": x, "labels": x}, layout=layout, documents=lengths, ignore_index=9)
        targets = torch.cat([x[:, 1:], x[:, :1]], dim=1)
        targets[:, [2, 3, 11]] = 9.0
        assert torch.equal(batch["labels"], targets[:, where]) and batch["num_items_in_batch"] == 9 * 3 * 2


def check_errors() -> None:
    rank, x = dist.get_rank(), whole(7)
    with pytest.raises(ValueError, match=r"2 tokens in dim 1, but 'zigzag' gives rank 0 3 of 7 .*\[3, 2, 2\]"):
        unshard(x[:, :2], 1, layout="zigzag", seq_len=7)
    with pytest.raises(ValueError, match="rank 2 3 of 9" if rank == 2 else "rank 2: 2 tokens"):
        unshard(x[:, : 3 - (rank == 2)], 1, seq_len=9)
    with pytest.raises(ValueError, match="dtype: rank 0 has torch.float64, rank 1 has torch.float32"):
        unshard(x.float() if rank == 1 else x, 1)
    assert torch.equal(unshard(shard(x, 1), 1, seq_len=7), x)  # the group is still good


def check_batch() -> None:
    ids = torch.randint(100, (2, 11), generator=torch.Generator().manual_seed(0))
    for layout in LAYOUTS:
        batch, where = shard_batch({"input_ids": ids, "labels": ids}, layout=layout), held(11, layout)
        shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
        assert torch.equal(batch["input_ids"], ids[:, where]) and torch.equal(batch["labels"], shifted[:, where])
        assert batch["position_ids"].tolist() == [where] and batch["num_items_in_batch"] == 20


CASES = (
    check_round_trip,
    check_gradients,
    check_16_bit_sum,
    check_convention,
    check_tie,
    check_batch,
    check_documents,
    check_errors,
    check_opcheck,
    check_compiled,
)


def check_all() -> None:
    for case in CASES:
        case()


def test_over_gloo() -> None:
    run(check_all, 3, timeout=120)  # one start of the ranks for all cases: importing torch costs more than they do


def test_sub_group_and_mesh_over_gloo() -> None:
    run(check_sub_group, 4, timeout=60)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_world_of_one(layout: str) -> None:
    x = whole(5).requires_grad_()
    assert torch.equal(shard(x, 1, layout=layout), x) and torch.equal(unshard(x, 1, layout=layout), x)
    assert torch.equal(positions(5, layout=layout), torch.arange(5))
    for operation in (lambda x: shard(x, 1, None, layout), lambda x: unshard(x, 1, None, layout, grad="sum")):
        assert torch.autograd.gradcheck(operation, x) and torch.autograd.gradgradcheck(operation, x)


def test_labels_are_shifted_before_the_cut() -> None:
    ids = torch.arange(10, 18).view(2, 4)
    labels = ids.masked_fill(ids == 15, -100)
    batch = shard_batch({"input_ids": ids, "labels": labels, "attention_mask": ids > 0, "use_cache": False})
    assert batch["labels"].tolist() == [[11, 12, 13, -100], [-100, 16, 17, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] and batch["use_cache"] is False
    assert batch["num_items_in_batch"] == 5
    targets = shard_batch({"input_ids": ids, "shift_labels": labels})
    assert torch.equal(targets["shift_labels"], labels) and targets["num_items_in_batch"] == 7
    packed = shard_batch({"input_ids": ids.T, "position_ids": ids.T, "labels": ids.T}, dim=-2, ignore_index=-1)
    assert packed["labels"].tolist() == [[11, 15], [12, 16], [13, 17], [-1, -1]]
    assert torch.equal(packed["position_ids"], ids.T)
    assert shard_batch({"input_ids": ids[:, :0], "labels": ids[:, :0]})["num_items_in_batch"] == 0


def test_tie_adds_zero_gradients_and_nothing_else() -> None:
    poison = torch.full((2, 3), torch.nan, requires_grad=True)
    indices, loss = torch.arange(3), torch.tensor(2.0, requires_grad=True)
    tied = tie(loss, poison, indices, poison.double())
    assert tied == 2.0
    tied.backward()
    assert loss.grad == 1 and not poison.grad.any()
    assert not tie(torch.zeros(()), torch.ones(2)).requires_grad
    assert tie(loss).requires_grad
    torch.library.opcheck(_tie, (loss, [poison.detach().T.requires_grad_(), torch.ones(0)]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: shard(x, 3), r"dim must be an int in \[-3, 3\) for the tensor of shape \(3, 4, 2\), got 3"),
        (lambda x: shard(x, True), "got True"),
        (lambda x: shard(x, 0, layout="ring"), "unknown layout 'ring'; choose one of contiguous, zigzag, striped"),
        (lambda x: shard(x, 0, group=1), "group"),
        (lambda x: unshard(x, 0, grad="mean"), "unknown grad 'mean'; choose one of slice, sum"),
        (lambda x: unshard(x, 1, seq_len=9), "4 tokens in dim 1, but 'contiguous' gives rank 0 9 of 9"),
        (lambda x: unshard(x, 1, seq_len=4.0), "seq_len must be a non-negative int, got 4.0"),
        (lambda x: shard(x, 1, documents=[1, 2]), "documents hold 3 tokens in all, but the sequence has 4"),
        (lambda x: shard(x, 1, documents=[4, 0]), "each document must have at least one token"),
        (lambda x: positions(-1), "seq_len must be a non-negative int, got -1"),
        (lambda x: shard_batch({"labels": x}), "must hold 'input_ids', got 'labels'"),
        (lambda x: shard_batch({"input_ids": x, "labels": x, "shift_labels": x}), "not both"),
        (
            lambda x: shard_batch({"input_ids": x, "mask": x[:, 1:]}),
            "'mask' has length 3 in dim 1, but 'input_ids' has 4",
        ),
        (lambda x: shard_batch({"input_ids": x, "mask": x[0, 0]}), r"for mask of shape \(2,\), got 1"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(whole(4))
