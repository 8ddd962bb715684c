"""A transformers model under Trainer: two added lines, and the losses of one process.

python examples/transformers_trainer.py
torchrun --nproc-per-node 8 examples/transformers_trainer.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ringattn.integrations.trainer import ContextParallelTrainerMixin
from ringattn.integrations.transformers import context_parallel
from ringattn.launch.spawn import run, torchrun_rank


class RingTrainer(ContextParallelTrainerMixin, Trainer):
    """Trainer whose processes share sequences."""


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))


def train(sequences: int) -> list[float]:
    """The logged loss of every step; `sequences` are computed at a time, by all ranks together."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    here = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, MASTER_ADDR="localhost", MASTER_PORT="0")
    for name, value in here.items():
        os.environ.setdefault(name, value)  # accelerate looks here; torchrun has set them
    rows = torch.arange(8)[:, None] + torch.arange(45)[None] % 13
    data = [{"input_ids": row, "labels": row.clone()} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=sequences,
            max_steps=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        model = make_model()
        cp = context_parallel(model)
        trainer = RingTrainer(model=model, args=arguments, train_dataset=data, context_parallel=cp)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(nproc: int = 2) -> dict[int, list[float]]:
    results = run(train, nproc, 2)
    if torchrun_rank() == 0:
        print("losses", results[0])
    return results


if __name__ == "__main__":
    main()
