"""The test to copy: one rank and many give the same loss and the same gradients.

    python examples/exactness.py                       # 4 ranks on this machine, no GPU needed
    torchrun --nproc-per-node 8 examples/exactness.py  # on these ranks

Put your own model and batch in place of the two functions. Everything else is the comparison: the model computes the
whole batch on every rank by itself, then its part of the sequence, and each gradient is judged in float64, where what
is left is rounding (1e-12); a label lost at a border or a factor of the world size shows as 1e-3 or more.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringattn import ContextParallel, attention
from ringattn.launch.model import Config, Transformer
from ringattn.launch.spawn import run, torchrun_rank

TOKENS = 61  # need not divide by anything


def make_model() -> nn.Module:
    return Transformer(Config(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8)).double()


def make_batch() -> dict[str, Tensor]:
    ids = torch.randint(256, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, : TOKENS // 3] = -100  # unevenly spread: a mean of means would be wrong
    return {"input_ids": ids, "labels": labels}


def compare() -> tuple[float, float]:
    """The difference of the losses, and the largest of the gradients relative to their norms."""
    batch = make_batch()
    alone = make_model()
    logits = alone(batch["input_ids"], torch.arange(TOKENS), partial(attention, mask="causal"))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    expected.backward()

    model, cp = make_model(), ContextParallel(layout="zigzag")
    local = cp.shard_batch(batch)
    attend = partial(cp.attention, mask="causal", seq_len=TOKENS)
    logits = model(local["input_ids"], local["position_ids"], attend)
    loss = (
        F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten(), reduction="sum") / local["num_items_in_batch"]
    )
    loss.backward()
    cp.sync_gradients(model.parameters())

    errors = [
        float((mine.grad - whole.grad).norm() / whole.grad.norm())
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    return float((cp.total(loss) - expected.detach()).abs()), max(errors)


def main(nproc: int = 4) -> None:
    """Compare on all ranks; raises if any of them is off."""
    results = run(compare, nproc)
    worst = [max(column) for column in zip(*results.values(), strict=True)]
    if torchrun_rank() == 0:
        print(f"loss off by {worst[0]:.1e}, gradients by {worst[1]:.1e}")
    assert max(worst) < 1e-12, worst


if __name__ == "__main__":
    main()
