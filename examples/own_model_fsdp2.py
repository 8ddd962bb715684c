"""An own model under FSDP2 on a mesh of dp x cp, as torchtitan lays it out: parameters over both axes, data over dp.

python examples/own_model_fsdp2.py
torchrun --nproc-per-node 8 examples/own_model_fsdp2.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ringattn import ContextParallel, sum_gradients
from ringattn.launch.model import Config, Transformer
from ringattn.launch.spawn import run, torchrun_rank

TOKENS, STEPS = 64, 5


def train() -> list[float]:
    """The loss of every step, over all tokens of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh, layout="zigzag", data=("dp",))
    model = Transformer(Config(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8))
    flat = mesh._flatten("dp_cp")
    for block in model.blocks:
        fully_shard(block, mesh=flat)
    fully_shard(model, mesh=flat)
    sum_gradients(model)  # or multiply the loss by cp.loss_scale
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attend = partial(cp.attention, mask="causal", seq_len=TOKENS)

    losses = []
    for step in range(STEPS):
        rows = torch.randint(256, (mesh["dp"].size(), TOKENS), generator=torch.Generator().manual_seed(step % 2))
        ids = rows[mesh.get_local_rank("dp")][None]  # every rank of a sequence reads the same
        batch = cp.shard_batch({"input_ids": ids, "labels": ids})
        logits = model(batch["input_ids"], batch["position_ids"], attend)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss = loss / batch["num_items_in_batch"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(cp.total(loss)))
    return losses


def main(nproc: int = 4) -> dict[int, list[float]]:
    results = run(train, nproc)
    if torchrun_rank() == 0:
        print("losses", [f"{loss:.6f}" for loss in results[0]])
    return results


if __name__ == "__main__":
    main()
