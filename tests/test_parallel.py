"""ContextParallel: gradients of one rank under replicas, DDP and FSDP2 on dp x cp; recomputation that sends nothing."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import ContextParallel, attention, sum_gradients
from ringattn.comm import get_comm, group_name
from ringattn.launch.model import Config, Transformer
from ringattn.launch.spawn import run

CONFIG = Config(dim=16, layers=2, heads=2, kv_heads=1, head_dim=8)
TOKENS = 21


def make_model() -> Transformer:
    model = Transformer(CONFIG).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.ndim == 2 else 1)
    return model


def rows(number: int) -> dict[str, Tensor]:
    """Sequences with as many targets less as their number says, so that a mean of means is wrong."""
    ids = torch.randint(256, (number, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row in range(number):
        labels[row, TOKENS - 6 * row :] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    def whole(grad: Any) -> Tensor:
        return grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()

    return {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def alone(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients on one rank: the mean over all targets of the batch."""
    model = make_model()
    logits = model(batch["input_ids"], torch.arange(TOKENS), partial(attention, mask="causal"))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    return loss.detach(), gradients(model)


def local_loss(model: nn.Module, cp: ContextParallel, batch: dict[str, Tensor]) -> Tensor:
    """This rank's sum of losses, divided by the number of targets on all ranks."""
    local = cp.shard_batch(batch)
    logits = model(local["input_ids"], local["position_ids"], partial(cp.attention, mask="causal", seq_len=TOKENS))
    total = F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten(), reduction="sum")
    return total / local["num_items_in_batch"]


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], factor: float = 1.0) -> None:
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        torch.testing.assert_close(grad, factor * expected[name], rtol=1e-9, atol=1e-11)


def check_rule() -> None:
    """One gradient, however it is reduced; without the factor it is off by exactly the world size."""
    batch = rows(2)
    loss, expected = alone(batch)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh, data=("dp",))
    assert (cp.world, cp.loss_scale, cp.layout) == (2, 4, "zigzag")
    row = mesh.get_local_rank("dp")
    mine = {name: x[row : row + 1] for name, x in batch.items()}

    model = make_model()
    part = local_loss(model, cp, mine)
    part.backward()
    cp.sync_gradients(model.parameters())
    torch.testing.assert_close(cp.total(part), loss)
    assert_equal(gradients(model), expected)

    for factor in (cp.loss_scale, 1):
        ddp = DistributedDataParallel(make_model())
        (local_loss(ddp, cp, mine) * factor).backward()
        assert_equal(gradients(ddp), expected, factor / 4)

    flat = mesh._flatten("dp_cp")
    for summed in (False, True):
        sharded = make_model()
        for block in sharded.blocks:
            fully_shard(block, mesh=flat)
        fully_shard(sharded, mesh=flat)
        if summed:
            sum_gradients(sharded)
        (local_loss(sharded, cp, mine) * (1 if summed else cp.loss_scale)).backward()
        assert_equal(gradients(sharded), expected)
        with pytest.raises(ValueError, match="DTensor"):
            cp.sync_gradients(sharded.parameters())


def test_gradients_of_replicas_ddp_and_fsdp2():
    run(check_rule, 4, timeout=120)


def check_two_at_once() -> None:
    """Two of them, in other layouts over other groups, in one process and in turn; a third axis is left alone."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
    both = [ContextParallel(mesh, "striped"), ContextParallel(None, "contiguous", schedule="all_gather")]
    assert [cp.world for cp in both] == [2, 4]
    batch = rows(1)
    loss, expected = alone(batch)
    models = [make_model() for _ in both]
    parts = [local_loss(model, cp, batch) for model, cp in zip(models, both, strict=True)]
    for model, cp, part in reversed(list(zip(models, both, parts, strict=True))):
        part.backward()
        cp.sync_gradients(model.parameters())
        torch.testing.assert_close(cp.total(part), loss)
        assert_equal(gradients(model), expected)
    x = torch.randn(3, TOKENS, 2, generator=torch.Generator().manual_seed(1))
    for cp in both:
        torch.testing.assert_close(cp.unshard(cp.shard(x, 1), 1, seq_len=TOKENS), x)
        assert torch.equal(cp.positions(TOKENS), cp.shard(torch.arange(TOKENS), 0))


def test_two_in_one_process():
    run(check_two_at_once, 4, timeout=120)


def check_sync() -> None:
    """Parameters that some or no ranks used, 16-bit ones, frozen ones."""
    rank, cp = dist.get_rank(), ContextParallel()
    used, other, never, frozen = (nn.Parameter(torch.zeros(3)) for _ in range(4))
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    frozen.requires_grad_(False)
    used.grad = torch.full((3,), float(rank + 1))
    other.grad = torch.full((3,), 7.0) if rank == 1 else None
    half.grad = torch.full((2,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
    cp.sync_gradients([used, other, never, half, frozen])
    assert used.grad.tolist() == [6.0] * 3 and other.grad.tolist() == [7.0] * 3
    assert never.grad is None and frozen.grad is None
    assert half.grad.tolist() == [258.0] * 2  # summed in bfloat16 it would be 256

    batch = rows(1)
    if rank == 2:
        batch["input_ids"][0, 5] += 1
    with pytest.raises(ValueError, match="input_ids.*rank 2"):
        cp.shard_batch(batch)


def test_sync_and_batches_that_differ():
    run(check_sync, 3, timeout=60)


def check_mesh_errors() -> None:
    mesh = DeviceMesh("cpu", torch.arange(2).view(1, 2), mesh_dim_names=("dp", "seq"))
    with pytest.raises(ValueError, match="no axis 'cp'"):
        ContextParallel(mesh)
    with pytest.raises(ValueError, match="no axis 'rows'"):
        ContextParallel(mesh, axis="seq", data=("rows",))
    with pytest.raises(ValueError, match="names axes of a DeviceMesh"):
        ContextParallel(data=("dp",))
    with pytest.raises(ValueError, match="unknown layout 'zag'"):
        ContextParallel(layout="zag")
    with pytest.raises(ValueError, match="no module of FSDP2"):
        sum_gradients(nn.Linear(2, 2))
    assert ContextParallel(mesh, axis="seq").world == 2


def test_mesh_errors():
    run(check_mesh_errors, 2, timeout=60)


def keep_attention(context: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
    kept = op == torch.ops.ringattn.attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Layer(nn.Module):
    """Projections around attention over the ranks."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp = cp
        generator = torch.Generator().manual_seed(3)
        self.qkv = nn.Parameter(torch.randn(8, 24, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (x @ self.qkv).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return x + self.cp.attention(query, key, value, mask="causal").transpose(1, 2).flatten(2).tanh()


def step(layer: nn.Module, run_layer: Any, x: Tensor) -> tuple[Tensor, int]:
    """The gradient of a layer, and the bytes of keys, values and their gradients that this rank sent for it."""
    wire = get_comm(group_name(None)).transport(None, x.device)
    before = wire.sent_bytes
    layer.zero_grad()
    run_layer(x).square().sum().backward()
    return layer.qkv.grad.clone(), wire.sent_bytes - before


def check_checkpointing() -> None:
    """Selective checkpointing keeps (O, LSE) and sends nothing again; full checkpointing runs the ring once more."""
    cp = ContextParallel()
    layer = Layer(cp)
    x = torch.randn(1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(cp.rank)).requires_grad_()
    expected, plain = step(layer, layer, x)
    forward = 2 * (cp.world - 1) * 2 * 6 * 4 * 8  # K and V on every hop: heads * tokens * dim * bytes
    assert plain > forward

    policy = partial(create_selective_checkpoint_contexts, keep_attention)
    grad, sent = step(layer, lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=policy), x)
    assert torch.equal(grad, expected) and sent == plain

    grad, sent = step(layer, lambda x: checkpoint(layer, x, use_reentrant=False), x)
    assert torch.equal(grad, expected) and sent == plain + forward

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grad, sent = step(layer, compiled, x)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)
    assert sent == plain
    compiled = torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=policy), fullgraph=True, backend="aot_eager"
    )
    grad, sent = step(layer, compiled, x)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)
    assert sent == plain


def test_recomputation_sends_nothing():
    run(check_checkpointing, 2, timeout=240)


def test_the_local_op_exports():
    class Local(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(query, key, value, mask="causal")

    inputs = tuple(torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    program = torch.export.export(Local(), inputs, strict=True)
    assert any(node.target is torch.ops.ringattn.attention.default for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*inputs), Local()(*inputs))
