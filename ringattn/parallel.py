"""`ContextParallel`: one sequence over the ranks of a group, from the cut of a batch to the sum of its gradients.

The rule for gradients. Let N be the number of targets of the *whole* batch, over all ranks that share the parameters
(the axis of the sequence and the axes of data alike). Every rank divides its own sum of losses by N; the loss that is
meant is the sum over ranks, and so is every gradient. Plain replicas call `sync_gradients`, which sums. DDP and FSDP
divide the sum by the number of their ranks: multiply the loss by `loss_scale`, which is that number, or let FSDP2 sum
(`sum_gradients`). Then one rank and many have the same gradients; whoever forgets is off by exactly the world size.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ringattn.attention import ring_attention
from ringattn.comm import Group, Terms, get_comm, resolve_group
from ringattn.layout import layout_name
from ringattn.shard import Documents, positions, shard, shard_batch, unshard

BUCKET = 1 << 24
"""Elements of gradients that are summed in one all-reduce: 64 MiB in float32."""


class ContextParallel:
    """The ranks that share one sequence, and how they hold it. Nothing is global: any number of them may live at once.

    Args:
        group: the ranks of one sequence: a ProcessGroup, a DeviceMesh of one dimension, or a mesh of several with an
            axis named `axis`; None is the default group, or a world of one without torch.distributed.
        layout: how the sequence is sharded, as in `ring_attention`.
        axis: name of the sequence's axis in a mesh of several dimensions.
        data: names of the mesh axes over which batches differ; losses and gradients are summed over them too. Other
            axes (tensor parallelism) are left alone.
        **settings: keywords for every `ring_attention`: schedule, heads_degree, transport, backend,
            grad_dtype, validate, check.

    Attributes:
        group: the process group of the sequence, None in a world of one.
        layout: the layout's name.
        rank, world: of this process within the group.
        loss_scale: how many ranks share the parameters, by which to multiply a loss whose gradients are averaged.

    Raises:
        ValueError: no such axis, an unknown layout, a group without this rank.

    Example:
        >>> cp = ContextParallel(layout="zigzag")  # in a world of one
        >>> batch = cp.shard_batch({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])})
        >>> batch["position_ids"].tolist(), cp.loss_scale
        ([[0, 1, 2]], 1)
    """

    def __init__(
        self,
        group: Group = None,
        layout: str = "zigzag",
        *,
        axis: str = "cp",
        data: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        if isinstance(group, DeviceMesh) and (group.ndim > 1 or data):
            missing = [name for name in (axis, *data) if name not in (group.mesh_dim_names or ())]
            if missing:
                raise ValueError(f"no axis {missing[0]!r} in the mesh; its axes are {group.mesh_dim_names}")
            self._data = tuple(resolved for name in data if (resolved := resolve_group(group[name])) is not None)
            group = group[axis]
        elif data:
            raise ValueError(f"data={tuple(data)!r} names axes of a DeviceMesh, but group is {group!r}")
        else:
            self._data = ()
        self.group: ProcessGroup | None = resolve_group(group)
        self.layout = layout_name(layout)
        self.rank, self.world = (self.group.rank(), self.group.size()) if self.group else (0, 1)
        self.settings = settings

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.world}, {self.layout}, loss_scale={self.loss_scale})"

    @property
    def loss_scale(self) -> int:
        scale = 1
        for group in self._groups():
            scale *= group.size()
        return scale

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Any:
        """`ring_attention` over this group in this layout; keywords go before the settings."""
        return ring_attention(query, key, value, group=self.group, layout=self.layout, **{**self.settings, **keywords})

    def shard(self, x: Tensor, dim: int, documents: Documents = None) -> Tensor:
        """This rank's tokens of a whole tensor, as `ringattn.shard`."""
        return shard(x, dim, self.group, self.layout, documents)

    def unshard(self, x: Tensor, dim: int, seq_len: int | None = None, **keywords: Any) -> Tensor:
        """The whole tensor on every rank, as `ringattn.unshard` (documents=, grad=)."""
        return unshard(x, dim, self.group, self.layout, seq_len, **keywords)

    def positions(self, seq_len: int, documents: Documents = None, device: Any = None) -> Tensor:
        """Global positions of this rank's tokens, as `ringattn.positions`."""
        return positions(seq_len, self.group, self.layout, documents, device)

    def shard_batch(self, batch: Mapping[str, Any], documents: Documents = None, **keywords: Any) -> dict[str, Any]:
        """This rank's part of a batch, as `ringattn.shard_batch`.

        "num_items_in_batch" is the number of targets over the data axes too, so all their ranks have to call it.

        Raises:
            ValueError: on every rank of the group, if they hold different batches.
        """
        self.agree_on(batch)
        local = shard_batch(batch, self.group, self.layout, documents, **keywords)
        if "num_items_in_batch" in local and "num_items_in_batch" not in batch:
            local["num_items_in_batch"] = self.sum_over_data(local["num_items_in_batch"])
        return local

    def agree_on(self, batch: Mapping[str, Any], error: Exception | None = None) -> None:
        """Raise on every rank if ranks of one sequence hold different tensors, or if any cannot go on.

        Compares sums of all words, as often as the setting `validate` says.

        Args:
            batch: tensors by name; what is no tensor is not compared.
            error: why this rank cannot go on.
        """
        if self.group is not None:
            comm = get_comm(self.group.group_name)
            if comm.due(self.settings.get("validate")):
                said: dict[str, Any] = {"the batch": sorted(key for key, x in batch.items() if isinstance(x, Tensor))}
                said |= {f"the batch's {key!r}": _words(x) for key, x in batch.items() if isinstance(x, Tensor)}
                comm.agree(Terms(said), error)
        if error is not None:
            raise error

    def sum_over_data(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the data axes; ranks of one sequence hold the same."""
        return _sum(x, self._data)

    def total(self, x: Tensor) -> Tensor:
        """The sum of a tensor, such as a loss for the log, over all ranks that share the parameters; detached."""
        return _sum(x, self._groups())

    def sync_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of plain replicas over all ranks, in float32 for 16-bit ones.

        A parameter that only some ranks used (an expert without tokens) counts as zero on the others. All ranks call
        it with the same parameters.

        Args:
            parameters: those of a model that no wrapper reduces.

        Raises:
            ValueError: a parameter of FSDP2, which reduces its gradients itself.
        """
        from torch.distributed.tensor import DTensor

        trained = [p for p in parameters if p.requires_grad]
        groups = self._groups()
        if any(isinstance(p, DTensor) for p in trained):
            raise ValueError("sync_gradients got DTensor parameters, whose wrapper reduces them: see loss_scale")
        if not trained or not groups:
            return
        used = torch.tensor([p.grad is not None for p in trained], dtype=torch.int64, device=trained[0].device)
        for parameter, ranks in zip(trained, _sum(used, groups).tolist(), strict=True):
            if ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in trained if p.grad is not None]):
            dtype = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = _sum(torch.cat([grad.reshape(-1).to(dtype) for grad in bucket]), groups)
            for grad, total in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(total.view_as(grad))

    def _groups(self) -> tuple[ProcessGroup, ...]:
        return self._data if self.group is None else (self.group, *self._data)


def sum_gradients(model: torch.nn.Module) -> None:
    """Let every FSDP2 module in a model sum gradients instead of averaging them, so that no loss needs a factor.

    Args:
        model: after `fully_shard`.

    Raises:
        ValueError: no module of it was given to `fully_shard`.
    """
    from torch.distributed.fsdp import FSDPModule

    wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not wrapped:
        raise ValueError(f"{type(model).__name__} holds no module of FSDP2: call fully_shard first")
    for module in wrapped:
        module.set_gradient_divide_factor(1.0)
        # Without this, FSDP2 asks for a premultiplied sum, which gloo does not have.
        module.set_force_sum_reduction_for_comms(True)


def _sum(x: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    """A detached sum over the groups, one after the other, through the host where a group cannot move the device."""
    total = x.detach().clone()
    for group in groups:
        wire = total.cpu() if get_comm(group.group_name).default_transport(x.device) == "host" else total
        dist.all_reduce(wire, group=group)
        total = wire.to(x.device)
    return total


def _buckets(grads: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Runs of gradients of one dtype and device, of about BUCKET elements."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        other = bucket and (grad.dtype, grad.device) != (bucket[0].dtype, bucket[0].device)
        if bucket and (other or size + grad.numel() > BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel()
    if bucket:
        yield bucket


def _words(x: Tensor) -> str:
    """Shape, dtype and a sum that changes with any one byte: bytes times odd numbers, modulo 2^64."""
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    odd = torch.arange(len(flat), device=x.device) * 2 + 1
    return f"{x.dtype} of shape {tuple(x.shape)}, sum {int((flat * odd).sum())}"
