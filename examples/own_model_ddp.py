"""An own model under DistributedDataParallel on a mesh of dp x cp: DDP averages, so the loss is multiplied.

python examples/own_model_ddp.py
torchrun --nproc-per-node 8 examples/own_model_ddp.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ringattn import ContextParallel
from ringattn.launch.model import Config, Transformer
from ringattn.launch.spawn import run, torchrun_rank

TOKENS, STEPS = 64, 5


def train() -> list[float]:
    """The loss of every step, over all tokens of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh, layout="zigzag", data=("dp",))
    model = DistributedDataParallel(Transformer(Config(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8)))
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
        (loss * cp.loss_scale).backward()
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
