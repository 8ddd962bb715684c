"""transformers models give on 1 to 4 ranks the loss and the gradients that they give alone, and refuse the rest."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.integrations.families import FAMILIES, make_batch, make_model
from ringattn.integrations.transformers import context_parallel
from ringattn.launch.spawn import run
from ringattn.testing import MOST_EPS, compare

transformers = pytest.importorskip("transformers")

Batch = dict[str, Any]


def step(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and every parameter's gradient."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), {name: torch.zeros(()) if grad is None else grad.clone() for name, grad in grads.items()}


def alone(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """What transformers itself computes; without a cache, as it is with packed documents."""
    return step(model, {**batch, "use_cache": False} if hasattr(model.config, "use_cache") else batch)


def over_ranks(model: Any, batch: Batch, group: Any = None, documents: Any = None, **settings: Any):
    """The same on the ranks of a group: the sum of the losses, and the gradients of plain replicas."""
    cp = context_parallel(model, group, **settings)
    model.zero_grad()
    loss = model(**cp.shard_batch(batch, documents)).loss
    loss.backward()
    cp.sync_gradients(model.parameters())
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    cp.remove()
    return cp.total(loss), grads


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], what: str) -> None:
    """Equal in float64, each gradient for itself, but for norms and losses, which transformers sums in float32."""
    torch.testing.assert_close(got[0].double(), expected[0].double(), rtol=3e-7, atol=0, msg=lambda m: f"{what}: {m}")
    for name, grad in got[1].items():
        error = compare(grad, expected[1][name])
        assert error.rel_norm < MOST_EPS * torch.finfo(torch.float32).eps, (
            f"{what}: gradient of {name} is off by {error.rel_norm:.1e}"
        )


def padded(batch: Batch, left: list[int], right: list[int]) -> Batch:
    """A batch whose rows begin and end with so many padding tokens."""
    mask = torch.ones_like(batch["input_ids"])
    labels = batch["labels"].clone()
    for row, (begin, end) in enumerate(zip(left, right, strict=True)):
        mask[row, :begin] = mask[row, mask.shape[1] - end :] = 0
        labels[row][mask[row] == 0] = -100
        if begin:
            labels[row, begin] = -100
    return {**batch, "labels": labels, "attention_mask": mask}


def packed(batch: Batch, lengths: list[int]) -> Batch:
    """A batch whose rows are documents of these lengths, told by positions that start anew."""
    places = torch.cat([torch.arange(length) for length in lengths])
    return {**batch, "position_ids": places[None].expand_as(batch["input_ids"])}


def variants(name: str) -> dict[str, Batch]:
    """Batches of a family by what is special about them; every kind of attention meets padding and packs somewhere."""
    batch = make_batch(name)
    kinds = {"plain": batch}
    if name in ("qwen3", "gemma3", "gpt-oss", "deepseek-v3"):
        kinds["padded on the right"] = padded(batch, [0, 0], [0, 9])
    if name in ("llama", "llama-dynamic", "phi3-longrope", "modernbert"):
        kinds["padded on both sides"] = padded(batch, [4, 0], [0, 30])
    if name in ("llama", "mistral", "gemma2"):
        kinds["packed"] = packed(batch, [11, 1, 20, 5])
    return kinds


def groups_of_four() -> dict[int, Any]:
    """Groups of 2, 3 and 4 ranks in a world of 4; those of 2 are every other rank."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    three = dist.new_group([0, 1, 2])
    return {2: halves[dist.get_rank() % 2], 3: three, 4: dist.group.WORLD}


def check_families(names: list[str], worlds: list[int]) -> None:
    groups = {world: group for world, group in groups_of_four().items() if world in worlds}
    for name in names:
        for kind, batch in variants(name).items():
            layouts = ("zigzag", "contiguous", "striped") if (name, kind) == ("llama", "plain") else ("zigzag",)
            expected = alone(make_model(name, torch.float64), batch)
            for world, group in groups.items():
                if dist.get_rank(group) < 0:
                    continue
                for layout in layouts:
                    got = over_ranks(make_model(name, torch.float64), batch, group, layout=layout)
                    assert_same(got, expected, f"{name}, {kind}, {world} ranks, {layout}")


def test_families_on_three_ranks():
    run(check_families, 4, list(FAMILIES), [3], timeout=280)


@pytest.mark.slow
def test_families_on_two_and_four_ranks():
    run(check_families, 4, list(FAMILIES), [2, 4], timeout=290)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_one_rank(name):
    for kind, batch in variants(name).items():
        expected = alone(make_model(name, torch.float64), batch)
        assert_same(over_ranks(make_model(name, torch.float64), batch), expected, f"{name}, {kind}")


def check_documents() -> None:
    """A pack is what its documents are one by one, for a family whose own masks do not know of packs."""
    lengths = [11, 1, 20, 5]
    batch = make_batch("gpt-oss", rows=1)
    pieces = [x.split(lengths, dim=1) for x in batch.values()]
    model = make_model("gpt-oss", torch.float64)
    loss: Any = 0
    for ids, labels in zip(*pieces, strict=True):
        logits = model(input_ids=ids, use_cache=False).logits
        targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[0, 1:]
        loss = loss + torch.nn.functional.cross_entropy(logits[0].float(), targets, reduction="sum")
    targets = sum(int((labels[:, 1:] != -100).sum()) for labels in pieces[1])
    (loss / targets).backward()
    expected = (loss.detach() / targets, {name: p.grad for name, p in model.named_parameters()})
    for kind in ("documents", "cu_seq_lens"):
        told: Batch = dict(batch)
        if kind == "cu_seq_lens":
            ends = torch.tensor([0, *lengths]).cumsum(0).int()
            told |= dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=20, max_length_k=20)
            told["labels"] = told["labels"].index_fill(1, ends[:-1].long(), -100)
            documents = None
        else:
            documents = lengths
        got = over_ranks(make_model("gpt-oss", torch.float64), told, documents=documents, layout="balanced")
        assert_same(got, expected, kind)


def check_schedules() -> None:
    """Other ways of moving blocks, as settings of the model."""
    batch = make_batch("gemma2")
    expected = alone(make_model("gemma2", torch.float64), batch)
    for settings in (dict(schedule="all_gather"), dict(schedule="direct"), dict(heads_degree=2)):
        got = over_ranks(make_model("gemma2", torch.float64), batch, **settings)
        assert_same(got, expected, str(settings))


def test_schedules_are_settings():
    run(check_schedules, 4, timeout=120)


def test_packs_are_their_documents():
    run(check_documents, 2, timeout=120)
