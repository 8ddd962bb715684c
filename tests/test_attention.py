"""ring_attention over real gloo processes gives what attention gives on one device, also through autograd's corners."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.utils.checkpoint import checkpoint

import ringattn
from ringattn import attention, ring_attention
from ringattn.comm import get_comm, group_name
from ringattn.launch.spawn import run
from ringattn.layout import LAYOUTS, make_shards, shard_positions
from ringattn.mask import OPEN
from ringattn.ops import Options, run_attention, run_attention_backward
from ringattn.schedule import SCHEDULES
from ringattn.testing import make_inputs

MASKS = {"full": "full", "causal": "causal", "window": ringattn.window(6, 2)}
LENGTHS = (24, 13, 2)


def held(layout: str, seq_len: int, group: dist.ProcessGroup | None = None) -> list[int]:
    shards = make_shards(layout, (seq_len,), dist.get_world_size(group))
    return shard_positions(shards[dist.get_rank(group)])


def results(qkv, do: Tensor, dlse: Tensor, call) -> list[Tensor]:
    """out, lse and the gradients of q, k and v."""
    qkv = [x.detach().requires_grad_() for x in qkv]
    out, lse = call(*qkv)
    torch.autograd.backward([out, lse], [do, dlse])
    return [out.detach(), lse.detach(), *(x.grad for x in qkv)]


def assert_ring(group: dist.ProcessGroup | None, layout: str, seq_len: int, mask, heads=(4, 2), **options) -> None:
    """The ring equals attention on one device, in float64, on this rank's rows."""
    q, k, v, do = make_inputs(2, *heads, seq_len, 8, 6, dtype=torch.float64)
    dlse = torch.randn(2, heads[0], seq_len, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = results((q, k, v), do, dlse, lambda *x: attention(*x, mask=mask, backend="reference", return_lse=True))
    rows = held(layout, seq_len, group)

    def ring(*x: Tensor):
        return ring_attention(
            *x, group=group, layout=layout, seq_len=seq_len, mask=mask, backend="reference", return_lse=True, **options
        )

    got = results([x[:, :, rows] for x in (q, k, v)], do[:, :, rows], dlse[:, :, rows], ring)
    for mine, whole in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, whole[:, :, rows], rtol=1e-11, atol=1e-12)


def check_grid() -> None:
    for layout in LAYOUTS:
        for mask in MASKS.values():
            for seq_len in LENGTHS:
                for schedule in SCHEDULES:
                    assert_ring(None, layout, seq_len, mask, schedule=schedule)
    for heads in ((4, 4), (4, 1)):
        assert_ring(None, "zigzag", 13, "causal", heads)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_the_grid(world):
    run(check_grid, world, timeout=120)


def check_sub_groups() -> None:
    """Ranks {1, 3} of 4 and the others at the same time, also as one axis of a mesh."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp", "dp"))
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for group in (halves[dist.get_rank() % 2], mesh["cp"], mesh["dp"]):
        resolved = group if isinstance(group, dist.ProcessGroup) else group.get_group()
        assert_ring(resolved, "zigzag", 13, "causal")
        q, k, v, _ = make_inputs(1, 2, 2, 8)
        rows = held("zigzag", 8, resolved)
        out = ring_attention(*(x[:, :, rows] for x in (q, k, v)), group=group, layout="zigzag", seq_len=8)
        torch.testing.assert_close(out, attention(q, k, v)[:, :, rows])


def test_sub_groups_and_meshes():
    run(check_sub_groups, 4, timeout=120)


def check_views() -> None:
    """Fused projections, transposes, and gradients of stride 0; both formats write their own memory order."""
    rank = dist.get_rank()
    q, k, v, _ = make_inputs(2, 4, 2, 12, 8, dtype=torch.float64)
    fused = torch.cat([q, k, v], dim=1).transpose(1, 2).contiguous()
    rows = slice(6 * rank, 6 * rank + 6)

    def grads(make, call) -> list[Tensor]:
        x = fused.detach().requires_grad_()
        out = call(*make(x))
        out.sum().backward()
        return [out.detach(), x.grad]

    expected = grads(lambda x: x.split([4, 2, 2], dim=2), lambda *x: attention(*x, qkv_format="bshd", mask="causal"))
    got = grads(
        lambda x: x[:, rows].split([4, 2, 2], dim=2),
        lambda *x: ring_attention(*x, qkv_format="bshd", mask="causal"),
    )
    assert got[0].is_contiguous()
    torch.testing.assert_close(got[0], expected[0][:, rows], rtol=1e-11, atol=1e-12)
    total = got[1].clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected[1], rtol=1e-11, atol=1e-12)


def test_views():
    run(check_views, 2, timeout=60)


def check_autograd_corners() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k, v, do = (x[:, :, 4 * rank : 4 * rank + 4] for x in make_inputs(1, 2, 1, 4 * world, 8, dtype=torch.float64))
    options = {"mask": "causal", "layout": "zigzag"}

    def leaves() -> list[Tensor]:
        return [x.detach().clone().requires_grad_() for x in (q, k, v)]

    plain = leaves()
    (ring_attention(*plain, **options) * do).sum().backward()
    expected = [x.grad for x in plain]

    twice = leaves()
    out = ring_attention(*twice, **options)
    out.backward(do, retain_graph=True)
    out.backward(do)
    for x, grad in zip(twice, expected, strict=True):
        torch.testing.assert_close(x.grad, 2 * grad)

    for reentrant in (False, True):
        again = leaves()
        checkpoint(lambda *x: ring_attention(*x, **options), *again, use_reentrant=reentrant).backward(do)
        assert all(torch.equal(x.grad, grad) for x, grad in zip(again, expected, strict=True))

    other = dist.new_group(list(range(world)))
    both = [leaves(), leaves()]
    outs = [ring_attention(*x, group=group, **options) for x, group in zip(both, (None, other), strict=True)]
    ring_attention(q, k, v, **options)  # a third call while two wait for their backward
    for out in reversed(outs):
        out.backward(do)
    for x in both:
        assert all(torch.equal(mine.grad, grad) for mine, grad in zip(x, expected, strict=True))

    only_lse = leaves()
    ring_attention(*only_lse, return_lse=True, **options)[1].sum().backward()
    assert only_lse[0].grad.abs().sum() > 0 and not only_lse[2].grad.any()


@pytest.mark.parametrize("world", [2, 3])
def test_autograd_corners(world):
    run(check_autograd_corners, world, timeout=60)


def check_gradient_ring_runs_everywhere() -> None:
    """A rank that needs no gradient, whose loss ignores its output, or that holds nothing still takes part."""
    rank = dist.get_rank()
    q, k, v, do = make_inputs(1, 2, 2, 8, 4, dtype=torch.float64)
    whole = [x.requires_grad_() for x in (q, k, v)]
    rows = slice(0, 4) if rank == 0 else slice(4, 8)

    (attention(*whole, mask="full") * do)[:, :, :4].sum().backward()
    expected = [x.grad for x in whole]
    mine = [x.detach()[:, :, rows].requires_grad_(rank == 0) for x in whole]
    out = ring_attention(*mine)
    assert out.requires_grad
    if rank == 0:
        (out * do[:, :, rows]).sum().backward()
        for x, grad in zip(mine, expected, strict=True):
            torch.testing.assert_close(x.grad, grad[:, :, rows])
    else:
        (0.0 * out).sum().backward()

    mine = [x.detach()[:, :, rows].requires_grad_() for x in whole]
    out = ring_attention(*mine)
    loss = (out * do[:, :, rows]).sum() if rank == 0 else ringattn.tie(torch.zeros(()), out)
    loss.backward()
    for x, grad in zip(mine, expected, strict=True):
        torch.testing.assert_close(x.grad, grad[:, :, rows])

    mine = [x.detach()[:, :, : 1 - rank].requires_grad_() for x in whole]
    ring_attention(*mine, seq_len=1).sum().backward()
    assert all(x.grad is not None for x in mine)

    with torch.no_grad():
        part = [x.detach()[:, :, rows] for x in whole]
        assert not ring_attention(*part).requires_grad
    assert not ring_attention(*(x.detach()[:, :, rows] for x in whole)).requires_grad


def test_the_gradient_ring_runs_everywhere():
    run(check_gradient_ring_runs_everywhere, 2, timeout=60)


def check_gradcheck() -> None:
    """Numerical derivatives of the sum over ranks: each rank moves its own inputs, the others follow in step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k, v, do = make_inputs(1, 2, 1, 3 * world, 2, dtype=torch.float64)
    dlse = torch.randn(1, 2, 3 * world, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rows = held("zigzag", 3 * world)
    mine = [x[:, :, rows].clone().requires_grad_() for x in (q, k, v)]

    def objective() -> Tensor:
        out, lse = ring_attention(*mine, layout="zigzag", mask="causal", softcap=2.0, return_lse=True)
        return (out * do[:, :, rows]).sum() + (lse * dlse[:, :, rows]).sum()

    objective().backward()
    for turn in range(world):
        for number in range(3):
            for entry in range(mine[number].numel()):
                slopes = []
                for step in (1e-6, -1e-6):
                    with torch.no_grad():
                        if rank == turn:
                            mine[number].view(-1)[entry] += step
                        total = objective().detach()
                        if rank == turn:
                            mine[number].view(-1)[entry] -= step
                    dist.all_reduce(total)
                    slopes.append(total)
                if rank == turn:
                    slope = (slopes[0] - slopes[1]) / 2e-6
                    torch.testing.assert_close(mine[number].grad.reshape(-1)[entry], slope, rtol=1e-6, atol=1e-7)


def test_gradcheck_on_two_ranks():
    run(check_gradcheck, 2, timeout=120)


def check_compile() -> None:
    """A whole step compiles without a graph break, with dynamic lengths too, and gives the same gradients."""
    rank = dist.get_rank()

    def step(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (x @ weight).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = ring_attention(q, k, v, layout="zigzag", mask="causal")
        return (out.transpose(1, 2).reshape(1, -1, 8) ** 2).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    weight = torch.randn(8, 24, generator=torch.Generator().manual_seed(0))
    for tokens in (6, 10):
        x = torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(rank))
        grads = []
        for function in (step, compiled):
            leaf = weight.clone().requires_grad_()
            function(x, leaf).backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_compile_without_graph_breaks():
    run(check_compile, 2, timeout=240)


def check_autocast() -> None:
    q, k, v, _ = make_inputs(1, 2, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ring_attention(q, k.bfloat16(), v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, ring_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_autocast_casts_mixed_dtypes():
    run(check_autocast, 2, timeout=60)


@pytest.mark.parametrize("bshd", [False, True])
def test_opcheck_with_permuted_inputs(bshd):
    q, k, v, _ = make_inputs(2, 4, 2, 6, 8)
    options = Options(
        layout="contiguous",
        lo=0,
        hi=OPEN,
        prefix=0,
        lengths=(6,),
        scale=0.5,
        softcap=0.0,
        schedule="ring",
        heads_degree=1,
        transport="",
        backend="reference",
        grad_dtype=torch.float32,
        bshd=bshd,
        group="",
        validate="",
        check="",
    )
    for order, sinks in (((0, 1, 2, 3), None), ((0, 2, 1, 3), torch.zeros(4)), ((3, 1, 0, 2), None)):
        back = [order.index(n) for n in range(4)]
        permuted = [x.permute(order).contiguous().permute(back).requires_grad_() for x in (q, k, v)]
        torch.library.opcheck(run_attention, (*permuted, sinks, 2, False, *options))
        inputs = [x.detach() for x in permuted]
        out, lse = run_attention(*inputs, sinks, 2, False, *options)
        grads = (torch.ones(()).expand_as(out), torch.zeros_like(lse))
        torch.library.opcheck(run_attention_backward, (*grads, *inputs, sinks, out, lse, *options))


def test_a_world_of_one_needs_no_process_group():
    q, k, v, _ = make_inputs(1, 4, 2, 10)
    for layout in LAYOUTS:
        torch.testing.assert_close(
            ring_attention(q, k, v, layout=layout, mask="causal"), attention(q, k, v, mask="causal")
        )


def test_lse_is_natural_and_rows_without_keys_are_empty():
    q, k, v, _ = make_inputs(1, 1, 1, 4, dtype=torch.float64)
    out, lse = attention(q, k, v, mask=ringattn.Band(lo=1), return_lse=True)
    assert lse[0, 0, 0] == -math.inf and not out[0, 0, 0].any()
    torch.testing.assert_close(lse[0, 0, 1], (q[0, 0, 1] @ k[0, 0, 0]) / 4)


def test_no_tokens_and_no_batch():
    for batch, tokens in ((1, 0), (0, 3)):
        q, k, v, _ = make_inputs(batch, 2, 2, tokens)
        assert attention(q, k, v).shape == (batch, 2, tokens, 16)


def check_comm_is_dropped_with_its_group() -> None:
    q = torch.randn(1, 1, 2, 4)
    group = dist.new_group(list(range(dist.get_world_size())))
    ring_attention(q, q, q, group=group)
    name = group_name(group)
    comm = get_comm(name)
    dist.destroy_process_group(group)
    assert not comm.alive()
    with pytest.raises(ValueError, match="destroyed"):
        ring_attention(q, q, q, group=group)
    ring_attention(q, q, q)
    outsider = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(ValueError, match="not in it"):
            ring_attention(q, q, q, group=outsider)


def test_groups_that_are_gone_or_foreign():
    run(check_comm_is_dropped_with_its_group, 2, timeout=60)
