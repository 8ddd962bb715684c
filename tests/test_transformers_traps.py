"""What adapters swallow or break: rotary embeddings, masks, wrappers, recomputation; and everything that is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringattn import sum_gradients
from ringattn.integrations.batch import lay_out
from ringattn.integrations.families import make_batch, make_model
from ringattn.integrations.transformers import context_parallel
from ringattn.launch.spawn import run
from ringattn.testing import compare

transformers = pytest.importorskip("transformers")


def gradients(model: Any) -> dict[str, Tensor]:
    def whole(grad: Any) -> Tensor:
        return grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()

    return {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], factor: float = 1.0) -> None:
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        assert compare(grad, factor * expected[name]).rel_norm < 1e-6, name


def alone(name: str, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model = make_model(name, torch.float64)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


def check_wrappers() -> None:
    """DDP and FSDP2 over dp x cp, and a loss whose gradients are averaged but that nobody multiplied."""
    batch = make_batch("llama")
    loss, expected = alone("llama", batch)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row = mesh.get_local_rank("dp")
    mine = {name: x[row : row + 1] for name, x in batch.items()}

    for factor in (4, 1):
        model = make_model("llama", torch.float64)
        cp = context_parallel(model, mesh, data=("dp",))
        wrapped = DistributedDataParallel(model)
        part = wrapped(**cp.shard_batch(mine)).loss
        (part * factor).backward()
        torch.testing.assert_close(cp.total(part), loss)
        assert cp.loss_scale == 4
        assert_equal(gradients(wrapped), expected, factor / 4)

    for before in (False, True):
        model = make_model("llama", torch.float64)
        cp = context_parallel(model, mesh, data=("dp",)) if before else None
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh._flatten("dp_cp") if "dp_cp" not in vars(mesh) else mesh["dp_cp"])
        fully_shard(model, mesh=mesh._flatten("dp_cp"))
        sum_gradients(model)
        cp = cp or context_parallel(model, mesh, data=("dp",))
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        model(**cp.shard_batch(mine)).loss.backward()
        assert_equal(gradients(model), expected)


def test_ddp_and_fsdp2():
    run(check_wrappers, 4, timeout=200)


def check_traps() -> None:
    batch = make_batch("llama-dynamic")
    for name in ("llama-dynamic", "phi3-longrope"):
        loss, expected = alone(name, batch)
        for layout in ("contiguous", "zigzag"):
            model = make_model(name, torch.float64)
            cp = context_parallel(model, layout=layout)
            part = model(**cp.shard_batch(batch)).loss
            torch.testing.assert_close(cp.total(part), loss)
            model = make_model(name, torch.float64)
            cp = context_parallel(model, layout=layout)
            for hook in cp._hooks[-2:]:
                hook.remove()  # those of the rotary embedding: without them every rank looks at its own positions
            blind = cp.total(model(**cp.shard_batch(batch)).loss)
            if (name, layout) != ("phi3-longrope", "zigzag"):  # there every rank has a position past the limit
                assert abs(blind - loss) > 1e-5, f"{name}, {layout}: {blind - loss}"

    batch = make_batch("llama")
    loss, expected = alone("llama", batch)
    for reentrant in (False, True):
        model = make_model("llama", torch.float64)
        cp = context_parallel(model)
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model(**cp.shard_batch(batch)).loss.backward()
        cp.sync_gradients(model.parameters())
        assert_equal(gradients(model), expected)

    for name in ("llama", "deepseek-v3"):
        batch = make_batch(name)
        model = make_model(name)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain = model(**batch).loss
            cp = context_parallel(model)
            torch.testing.assert_close(cp.total(model(**cp.shard_batch(batch)).loss), plain.detach(), rtol=2e-2, atol=0)

    short = {name: x[:, :3] for name, x in make_batch("llama").items()}
    with pytest.raises(ValueError, match=r"3 tokens over 4 ranks.*\(1, 1, 1, 0\)"):
        context_parallel(make_model("llama"), layout="contiguous").shard_batch(short)


def test_rotary_embeddings_checkpointing_and_autocast():
    run(check_traps, 4, timeout=250)


def check_compile(backend: str, names: list[str], lengths: list[int]) -> None:
    """A whole step without a graph break, also over packed documents and windows."""
    for name in names:
        model = make_model(name, torch.float64)
        cp = context_parallel(model)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for tokens in lengths:
            model.zero_grad()
            batch = make_batch(name, tokens=tokens)
            if tokens == 29:
                batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(20)])[None]
            loss, expected = alone(name, batch)
            part = compiled(**cp.shard_batch(batch)).loss
            part.backward()
            cp.sync_gradients(model.parameters())
            torch.testing.assert_close(cp.total(part), loss)
            assert_equal(gradients(model), expected)


def test_compile_without_graph_breaks():
    run(check_compile, 2, "aot_eager", ["gemma2"], [37], timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_other_lengths_and_packs(backend):
    run(check_compile, 2, backend, ["llama", "gemma2"], [37, 30, 29], timeout=290)


def check_refusals() -> None:
    rank = dist.get_rank()
    model = make_model("llama")
    cp = context_parallel(model)
    batch = make_batch("llama")
    ids = batch["input_ids"]
    local = cp.shard_batch(batch)

    def refused(error: type[Exception], match: str, call: Any) -> None:
        with pytest.raises(error, match=match):
            call()

    refused(ValueError, "keywords from shard_batch", lambda: model(**batch))
    refused(ValueError, "keywords from shard_batch", lambda: model(ids))
    refused(ValueError, "no context reached attention", lambda: model.model(ids))
    refused(NotImplementedError, "attention_mask", lambda: model(**local, attention_mask=torch.ones(2, 4)))
    refused(NotImplementedError, "attention_mask", lambda: model.model(ids, attention_mask=torch.ones_like(ids)))
    refused(NotImplementedError, "KV cache", lambda: model(**{**local, "use_cache": True}))
    refused(NotImplementedError, "output_attentions=True", lambda: model(**local, output_attentions=True))
    refused(NotImplementedError, "position_bias=a tensor", lambda: model(**local, position_bias=torch.zeros(1)))
    model.model.layers[0].self_attn.attention_dropout = 0.1
    refused(NotImplementedError, "dropout=0.1", lambda: model(**local))
    model.eval()(**local)
    model.model.layers[0].self_attn.attention_dropout = 0.0

    holes = torch.ones_like(ids)
    holes[1, 5] = 0
    refused(ValueError, "hole in row 1", lambda: cp.shard_batch({**batch, "attention_mask": holes}))
    one = {**batch, "attention_mask": holes if rank else torch.ones_like(ids)}
    refused(ValueError, "hole in row 1", lambda: cp.shard_batch(one))
    square = torch.ones(2, 1, ids.shape[1], ids.shape[1])
    refused(ValueError, "'attention_mask' has shape", lambda: cp.shard_batch({**batch, "attention_mask": square}))
    other = {**batch, "input_ids": ids + (rank == 1)}
    refused(ValueError, "rank 1", lambda: cp.shard_batch(other))
    refused(ValueError, "'pixel_values' has shape", lambda: cp.shard_batch({**batch, "pixel_values": torch.ones(3)}))
    refused(ValueError, "unknown keyword 'layout'", lambda: cp.shard_batch(batch, layout="zigzag"))
    refused(NotImplementedError, "prepared already", lambda: context_parallel(model))

    cp.remove()
    assert model.config._attn_implementation == "plain"
    before = make_model("llama")
    assert torch.equal(model(**batch).loss, before(**batch).loss)
    refused(ValueError, "unknown setting 'window'", lambda: context_parallel(model, window=3))


def test_refusals_on_all_ranks():
    run(check_refusals, 2, timeout=120)


def test_models_that_are_refused():
    tiny: dict[str, Any] = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    heads: dict[str, Any] = dict(num_attention_heads=2, num_key_value_heads=1)

    def refused(match: str, model: Any, error: type[Exception] = NotImplementedError) -> None:
        with pytest.raises(error, match=match):
            context_parallel(model)

    refused("got Linear", torch.nn.Linear(2, 2), ValueError)
    t5 = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    refused("cross-attention", transformers.T5ForConditionalGeneration(t5))
    bloom = transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    refused("cannot be replaced", transformers.BloomForCausalLM(bloom))
    mamba = transformers.Mamba2Config(**{**tiny, "num_heads": 4, "head_dim": 8, "n_groups": 1})
    refused("outside of attention", transformers.Mamba2ForCausalLM(mamba))
    mixtral = transformers.MixtralConfig(**tiny, **heads, num_local_experts=2, output_router_logits=True)
    refused("output_router_logits", transformers.MixtralForCausalLM(mixtral))

    def bert() -> Any:
        return transformers.BertConfig(**tiny, num_attention_heads=2)

    cp = context_parallel(transformers.BertForMaskedLM(bert()))
    ids = torch.arange(8)[None]
    with pytest.raises(NotImplementedError, match="BertForMaskedLM takes the mean"):
        cp.shard_batch({"input_ids": ids, "labels": ids})
    cp = context_parallel(transformers.BertForSequenceClassification(bert()))
    with pytest.raises(NotImplementedError, match="ForSequenceClassification"):
        cp.shard_batch({"input_ids": ids, "labels": torch.zeros_like(ids)})


def test_a_loss_function_that_is_not_told_the_targets_is_refused():
    model = make_model("llama")
    cp = context_parallel(model)
    batch = cp.shard_batch(make_batch("llama"))
    for name in ("num_items_in_batch", "shift_labels"):
        with pytest.raises(NotImplementedError, match="keeps num_items_in_batch or shift_labels"):
            model(**{key: x for key, x in batch.items() if key != name})


def test_padding_is_left_out_and_documents_are_found():
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    whole = lay_out({"input_ids": ids, "attention_mask": mask}, causal=True)
    assert whole.batch["input_ids"].tolist() == [[1, 2, 3, 6, 7, 8, 9, 10, 11]]
    assert whole.batch["position_ids"].tolist() == [[1, 2, 3, 0, 1, 2, 3, 4, 5]]
    assert (whole.lengths, whole.most) == ((3, 6), 5)
    empty = torch.tensor([[0] * 6, [1] * 6])
    assert lay_out({"input_ids": ids, "attention_mask": empty}, causal=True).lengths == (6,)

    same = torch.tensor([0, 1, 0, 1, 2, 3])
    whole = lay_out({"input_ids": ids, "position_ids": same[None]}, causal=True)
    assert whole.lengths == (2, 4) and whole.batch["input_ids"].shape == (2, 6)
    assert lay_out({"input_ids": ids, "position_ids": same[None]}, causal=False).lengths == (6,)
    places = torch.stack([same, torch.arange(6)])
    assert lay_out({"input_ids": ids, "position_ids": places}, causal=True).lengths == (2, 4, 6)

    labels = ids.clone()
    with pytest.raises(ValueError, match="targets at padding"):
        lay_out({"input_ids": ids, "attention_mask": mask, "labels": labels}, causal=True)
    with pytest.raises(ValueError, match=r"zeros and ones, got \[0, 2\]"):
        lay_out({"input_ids": ids, "attention_mask": 2 * mask}, causal=True)
    with pytest.raises(ValueError, match="documents hold 5 tokens"):
        lay_out({"input_ids": ids}, causal=True, documents=[2, 3])
    with pytest.raises(ValueError, match="leave the padding out"):
        lay_out({"input_ids": ids, "attention_mask": mask}, causal=True, documents=[2, 4])
    with pytest.raises(ValueError, match="one row"):
        lay_out({"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 6])}, causal=True)
