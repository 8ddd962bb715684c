"""Per family and world: how far loss and gradients over ranks are from float64, beside one rank in the same dtype.

    python benchmarks/bench_transformers.py [--worlds 1 2 3 4] [--families llama gemma2 ...] [--dtype float32]

The float64 result is transformers' own masks with attention by its formula. "loss" is the difference over ranks, with
that of one rank in parentheses; "worst" is the largest error of a gradient relative to its norm, and "ratio" the error
of all gradients together over that of one rank. On these tiny models a single gradient of 32 numbers may be twice as
far off by chance as on one rank, so ratios of single ones are printed, not judged.
"""

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor

from ringattn.integrations.families import FAMILIES, make_batch, make_model
from ringattn.integrations.transformers import context_parallel
from ringattn.launch.spawn import run
from ringattn.testing import compare

Result = tuple[float, Tensor, dict[str, Tensor]]


def measured(name: str, dtype: torch.dtype, ranks: bool) -> Result:
    """Loss, all gradients as one vector, and each, of one step; over the default group's ranks or on one."""
    model, batch = make_model(name, dtype), make_batch(name)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if ranks:
        cp = context_parallel(model)
        loss = model(**cp.shard_batch(batch)).loss
        loss.backward()
        cp.sync_gradients(model.parameters())
        loss = cp.total(loss)
    else:
        loss = model(**batch).loss
        loss.backward()
    grads = {key: p.grad.double() for key, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), torch.cat([grad.flatten() for grad in grads.values()]), grads


def rows(names: list[str], dtype: torch.dtype) -> list[dict[str, Any]]:
    """One line a family, on the ranks that run this."""
    found = []
    for name in names:
        exact, single = measured(name, torch.float64, ranks=False), measured(name, dtype, ranks=False)
        many = measured(name, dtype, ranks=True)
        errors = {key: compare(grad, exact[2][key]) for key, grad in many[2].items()}
        alone = {key: compare(grad, exact[2][key]) for key, grad in single[2].items()}
        found.append(
            dict(
                family=name,
                loss=abs(many[0] - exact[0]),
                single_loss=abs(single[0] - exact[0]),
                worst=max(error.rel_norm for error in errors.values()),
                single_worst=max(error.rel_norm for error in alone.values()),
                ratio=compare(many[1], exact[1]).norm / compare(single[1], exact[1]).norm,
                single_ratio=max(errors[key].norm / alone[key].norm for key in alone if alone[key].norm),
            )
        )
    return found


def host_seconds(layers: int = 32) -> float:
    """Seconds to prepare a model of so many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=layers, **sizes))
    begin = time.perf_counter()
    context_parallel(model)
    return time.perf_counter() - begin


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    print(
        "| family | ranks | dtype | loss (one rank) | worst gradient (one rank) | all gradients, ratio | worst ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    for world in options.worlds:
        results = run(rows, world, options.families, dtype)
        for number, name in enumerate(options.families):
            row = max((results[rank][number] for rank in results), key=lambda line: line["ratio"])
            print(
                f"| {name} | {world} | {options.dtype} | {row['loss']:.1e} ({row['single_loss']:.1e}) "
                f"| {row['worst']:.1e} ({row['single_worst']:.1e}) | {row['ratio']:.2f} | {row['single_ratio']:.2f} |"
            )
    print(f"\npreparing a model of 32 layers: {host_seconds():.3f} s on the host")


if __name__ == "__main__":
    main(sys.argv[1:])
