"""`ContextParallelTrainerMixin`: transformers' Trainer over dp x cp, with the losses and weights of one process."""

from typing import Any

from torch.utils.data import DataLoader

from ringattn.integrations.transformers import TransformersParallel


class ContextParallelTrainerMixin:
    """Put before `Trainer` in a class's bases; the ranks of one sequence then read the same batches and share them.

        class RingTrainer(ContextParallelTrainerMixin, Trainer): ...
        trainer = RingTrainer(model=model, args=args, train_dataset=data, context_parallel=cp)

    Trainer itself averages gradients over all processes and multiplies the loss by their number, so nothing is left to
    scale. Ranks of a group are neighbours: rank r reads the data of r // world of the group.

    Args:
        context_parallel: what `context_parallel(model, group)` returned for the model that is trained.

    Raises:
        ValueError: a group of ranks that are not neighbours, or settings under which losses are not summed.
    """

    def __init__(self, *args: Any, context_parallel: TransformersParallel, **keywords: Any) -> None:
        self.context_parallel = context_parallel
        super().__init__(*args, **keywords)
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        cp = context_parallel
        if accelerator.process_index % cp.world != cp.rank:
            raise ValueError(
                f"process {accelerator.process_index} is rank {cp.rank} of {cp.world} of its sequence, but ranks of a "
                "sequence must be neighbours: make 'cp' the last axis of the mesh"
            )
        arguments: Any = self.args  # type: ignore[attr-defined]
        if not arguments.average_tokens_across_devices:
            raise ValueError("average_tokens_across_devices=False averages losses over ranks; leave it True")
        if arguments.label_smoothing_factor or getattr(self, "compute_loss_func", None) is not None:
            raise ValueError(
                "label_smoothing_factor and compute_loss_func take the loss from the model; leave them out"
            )

    def get_cp_size(self) -> int:
        """Ranks that count the same targets."""
        return self.context_parallel.world

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        """The loss of this rank's part of a batch."""
        count = keywords.get("num_items_in_batch")  # over the accumulated batches, which Trainer alone knows
        whole = inputs if count is None else {**inputs, "num_items_in_batch": count}
        batch = self.context_parallel.shard_batch(whole)
        return super().compute_loss(model, batch, *args, **keywords)  # type: ignore[misc]

    def get_train_dataloader(self) -> DataLoader:
        """Batches that differ between sequences and not between the ranks of one."""
        trainer: Any = self
        return self._deal(trainer.train_dataset, trainer._train_batch_size, trainer._get_train_sampler())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As `get_train_dataloader`, in order; the loss is exact, logits are this rank's own."""
        trainer: Any = self
        data = trainer.eval_dataset if eval_dataset is None else eval_dataset
        data = trainer.eval_dataset[data] if isinstance(data, str) else data
        return self._deal(data, trainer.args.eval_batch_size, None)

    def _deal(self, data: Any, batch_size: int, sampler: Any) -> DataLoader:
        from accelerate.data_loader import prepare_data_loader

        trainer: Any = self
        accelerator, arguments, world = trainer.accelerator, trainer.args, self.context_parallel.world
        loader: DataLoader = DataLoader(
            data,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=trainer.data_collator,
            drop_last=arguments.dataloader_drop_last,
            num_workers=arguments.dataloader_num_workers,
            pin_memory=arguments.dataloader_pin_memory,
        )
        return prepare_data_loader(
            loader,
            device=accelerator.device,
            num_processes=accelerator.num_processes // world,
            process_index=accelerator.process_index // world,
            put_on_device=True,
            use_seedable_sampler=True,
            data_seed=arguments.data_seed,
        )
