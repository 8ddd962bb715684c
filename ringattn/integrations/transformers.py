"""A transformers model on the ranks of one sequence: two lines, the same loss and gradients.

    cp = context_parallel(model, mesh["cp"])
    loss = model(**cp.shard_batch(batch)).loss      # this rank's part; ringattn.parallel has the rule for gradients

`shard_batch` puts a `Context` into the batch, which the model passes down to every attention layer: nothing is global,
and a call without one is an error, not attention over a shard. Whatever an attention layer is given and this function
does not honour raises an error that names it.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ringattn.attention import ring_attention
from ringattn.comm import Group
from ringattn.integrations.batch import IGNORE, lay_out
from ringattn.layout import shard_sizes
from ringattn.mask import window
from ringattn.parallel import ContextParallel

NAME = "ringattn"
"""Of the attention implementation, and of the keyword by which a model passes a `Context` down."""

SETTINGS = ("schedule", "heads_degree", "transport", "backend", "grad_dtype", "validate", "check")
LAYERS = ("full_attention", "sliding_attention")
LOCAL_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the largest position that they see."""

HARMLESS = {
    "position_ids",
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "use_cache",
    "cache_position",
    "logits_to_keep",
    "return_dict",
    "deterministic",
    "output_hidden_states",
}
"""Keywords that reach attention and change nothing of it."""


@dataclass(frozen=True)
class Context:
    """What attention has to know of a batch; travels with it.

    Attributes:
        group: the ranks of the sequence; None for a world of one.
        layout: how they hold it.
        lengths: of the documents in a row.
        most: the largest position on any rank.
        settings: names and values of further keywords of `ring_attention`.
    """

    group: ProcessGroup | None
    layout: str
    lengths: tuple[int, ...]
    most: int
    settings: tuple[tuple[str, Any], ...] = ()


def register() -> None:
    """Add "ringattn" to transformers' attention implementations; `context_parallel` does it too.

    There is no mask function of that name: documents and padding are in the context, a mask that a model is given
    arrives here or at the model's hook and is refused, and transformers' look at position ids, which would take the
    borders of a shard for those of documents, is never taken.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for every layer, in its own terms.

    Args:
        module: the layer.
        query: (B, H, S, D) of this rank.
        key, value: (B, G, S, D) and (B, G, S, Dv).
        attention_mask: must be None.
        dropout: must be 0.
        scaling: factor of the scores.
        sliding_window: W keys are seen including the query itself; in a bidirectional layer W - 1 to each side.
        softcap: as in `ring_attention`.
        s_aux: (H,), learned sinks.
        is_causal: overrides the layer's own attribute.
        **keywords: "ringattn", the `Context`, and what does not change attention.

    Returns:
        (B, S, H, Dv), contiguous, and None.

    Raises:
        ValueError: no context came along.
        NotImplementedError: an argument that is not honoured, by name.
    """
    context = keywords.pop(NAME, None)
    if not isinstance(context, Context):
        raise ValueError(
            "no context reached attention: prepare the model with context_parallel(model, group) and call it with "
            "batches from its shard_batch; generation over a sharded sequence is not supported"
        )
    _refuse(module, attention_mask, dropout, sliding_window, softcap, keywords)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reach = -1 if sliding_window is None else sliding_window - 1
    mask = window(reach, 0) if causal else window(reach, reach)
    one = len(context.lengths) == 1
    out: Any = ring_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        group=context.group,
        layout=context.layout,
        mask=mask,
        seq_len=context.lengths[0] if one else None,
        documents=None if one else context.lengths,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        qkv_format="bshd",
        **dict(context.settings),
    )
    return out, None


def _refuse(
    module: nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    keywords: dict[str, Any],
) -> None:
    """Raise for what a layer asks for and would not get."""
    layer = f"{type(module).__name__} {getattr(module, 'layer_idx', '')}".strip()
    if attention_mask is not None:
        raise NotImplementedError(f"{layer}: attention_mask is not taken; padding goes through shard_batch")
    if dropout:
        raise NotImplementedError(f"{layer}: dropout={dropout} on attention weights is not supported; set it to 0")
    for name, said in keywords.items():
        if name not in HARMLESS and said is not None and said is not False:
            raise NotImplementedError(f"{layer}: {name}={_short(said)} is not supported")
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and index is not None and kinds[index] == "sliding_attention" and sliding_window is None:
        raise NotImplementedError(f"{layer} is a sliding layer that passes no sliding_window to its attention")
    if getattr(config, "attn_logit_softcapping", None) and softcap is None:
        raise NotImplementedError(f"{layer}: config.attn_logit_softcapping is set, but the layer passes no softcap")


def _short(said: Any) -> str:
    return f"a tensor of shape {tuple(said.shape)}" if isinstance(said, Tensor) else repr(said)


def context_parallel(
    model: nn.Module, group: Group = None, layout: str = "zigzag", **settings: Any
) -> "TransformersParallel":
    """Prepare a transformers model for sequences over several ranks, in place.

    Before or after `fully_shard`, before `DistributedDataParallel` and `torch.compile`.

    Args:
        model: a causal or masked language model, the same on all ranks.
        group: the ranks of one sequence, or a mesh with an axis "cp"; as in `ContextParallel`.
        layout: as in `ring_attention`.
        **settings: `axis` and `data` of `ContextParallel`; keywords of `ring_attention`.

    Returns:
        A `ContextParallel` whose `shard_batch` takes transformers batches, and `remove()`.

    Raises:
        ValueError: no transformers model, or an unknown setting.
        NotImplementedError: a model whose tokens meet outside of attention, or whose attention is none of ours.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
        >>> cp = context_parallel(model)
        >>> ids = torch.arange(10)[None]
        >>> model(**cp.shard_batch({"input_ids": ids, "labels": ids})).loss.ndim
        0
    """
    return TransformersParallel(model, group, layout, **settings)


class TransformersParallel(ContextParallel):
    """What `context_parallel` returns.

    Args:
        model, group, layout, settings: as in `context_parallel`.

    Attributes:
        model: the prepared model.
        causal: whether its attention is.
    """

    def __init__(self, model: Any, group: Group = None, layout: str = "zigzag", **settings: Any) -> None:
        places = {name: settings.pop(name) for name in ("axis", "data") if name in settings}
        unknown = [name for name in settings if name not in SETTINGS]
        if unknown:
            raise ValueError(f"unknown setting {unknown[0]!r}; choose from {', '.join(SETTINGS)}, axis, data")
        super().__init__(group, layout, **places, **settings)
        self.model: Any = model
        check_model(model)
        register()
        self.causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
        self._most = 0
        self._before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        self._loss: Any = self.model.loss_function
        self.model.loss_function = self._counted_loss
        self._hooks = [model.register_forward_pre_hook(self._enter, with_kwargs=True)]
        for module in model.modules():
            if module is not model and hasattr(module, "set_attn_implementation"):
                self._hooks.append(module.register_forward_pre_hook(_refuse_masks, with_kwargs=True))
            kinds = getattr(module, "rope_type", None)
            if set(kinds.values() if isinstance(kinds, dict) else [kinds]) & set(LOCAL_ROPE):
                self._hooks.append(module.register_forward_pre_hook(self._show_all_positions, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(_hide_last_position))

    def shard_batch(self, batch: Mapping[str, Any], documents: Any = None, **unknown: Any) -> dict[str, Any]:
        """This rank's part of a batch that all ranks of the group hold, for `model(**batch)`.

        Labels are shifted as transformers shifts them, before the cut; padding is left out; packed documents are known
        from `documents`, "cu_seq_lens_q", or positions that start anew. Lengths need not divide. With labels, the
        model's loss is this rank's part of the mean over all targets: `total` gives the mean.

        Args:
            batch: as a collator makes it, the same on every rank of the group. "num_items_in_batch", if it is there, is
                what the loss is divided by; otherwise it is the number of targets in all ranks' batches.
            documents: lengths of the documents in every row, or their running sums.

        Returns:
            The batch, cut; "ringattn" is the `Context`. Padded rows of different length come back as one row.

        Raises:
            ValueError: on every rank, for what does not fit, and for ranks of a group that hold different batches.
            NotImplementedError: labels for a model whose loss does not add up over ranks.
        """
        if unknown:
            raise ValueError(f"unknown keyword {next(iter(unknown))!r}; shard_batch takes a batch and documents")
        whole, error = None, None
        try:
            self._check_labels(batch)
            whole = lay_out(batch, causal=self.causal, documents=documents)
            sizes = shard_sizes(self.layout, whole.lengths, self.world)
            if min(sizes) == 0:
                raise ValueError(f"{sum(sizes)} tokens over {self.world} ranks, but a model needs one on each: {sizes}")
        except (ValueError, NotImplementedError) as raised:
            error = raised
        self.agree_on(batch, error)
        assert whole is not None
        local = {
            name: self.shard(x, 1, whole.lengths) if isinstance(x, Tensor) and name != "num_items_in_batch" else x
            for name, x in whole.batch.items()
        }
        if "labels" in local and "num_items_in_batch" not in local:
            local["num_items_in_batch"] = self.sum_over_data((whole.batch["labels"] != IGNORE).sum())
        if hasattr(self.model.config, "use_cache"):
            local.setdefault("use_cache", False)
        settings = tuple(self.settings.items())
        local[NAME] = Context(self.group, self.layout, whole.lengths, whole.most, settings)
        return local

    def remove(self) -> None:
        """Give the model back as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.model.set_attn_implementation(self._before)
        del self.model._loss_function

    def _check_labels(self, batch: Mapping[str, Any]) -> None:
        """Raise if the model would take a mean of its own."""
        if "labels" not in batch and "shift_labels" not in batch:
            return
        model, kind = type(self.model).__name__, getattr(self.model, "loss_type", None)
        if kind not in ("ForCausalLM", "ForMaskedLM"):
            raise NotImplementedError(f"{model}: a loss of type {kind} does not add up over ranks; leave labels out")
        if "loss_function" not in inspect.unwrap(type(self.model).forward).__code__.co_names:
            raise NotImplementedError(
                f"{model} takes the mean over this rank's targets itself; leave labels out and compute the loss from "
                "the logits: a sum, divided by the number of targets on all ranks"
            )

    def _counted_loss(self, *args: Any, num_items_in_batch: Any = None, **keywords: Any) -> Tensor:
        """The model's loss function, where it is given all that it needs to be a part of the whole loss."""
        if num_items_in_batch is None or (self.causal and keywords.get("shift_labels") is None):
            raise NotImplementedError(
                f"{type(self.model).__name__} keeps num_items_in_batch or shift_labels from its loss function"
            )
        return self._loss(*args, num_items_in_batch=num_items_in_batch, **keywords)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if args or not isinstance(keywords.get(NAME), Context):
            raise ValueError(f"call the model with keywords from shard_batch: {type(module).__name__}(**batch)")
        _refuse_masks(module, args, keywords)
        self._most = keywords[NAME].most

    def _show_all_positions(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Append the sequence's largest position to a rank's own, for frequencies that depend on it."""
        at = None if "position_ids" in keywords else 1
        own = keywords["position_ids"] if at is None else args[at]
        seen = torch.cat([own, own.new_full((own.shape[0], 1), self._most)], dim=1)
        if at is None:
            return args, {**keywords, "position_ids": seen}
        return (args[0], seen, *args[2:]), keywords


def _hide_last_position(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    cos, sin = output
    return cos[:, :-1], sin[:, :-1]


def _refuse_masks(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Models drop a padding mask for an attention implementation that they do not know: refuse it before."""
    if keywords.get("attention_mask") is not None:
        raise NotImplementedError(f"{type(module).__name__}: attention_mask is not taken; it goes through shard_batch")
    if keywords.get("past_key_values") is not None or keywords.get("use_cache"):
        raise NotImplementedError(f"{type(module).__name__}: a KV cache over a sharded sequence is not supported")


def check_model(model: Any) -> None:
    """Raise for a model that would not compute over ranks what it computes on one.

    Raises:
        ValueError: no transformers model.
        NotImplementedError: names what stands in the way.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"context_parallel takes a transformers model, got {type(model).__name__}")
    config: Any = model.config
    reasons = []
    if config._attn_implementation == NAME:
        reasons.append("it is prepared already: call remove() first")
    if not model._can_set_attn_implementation():
        reasons.append("its attention does not go through transformers' AttentionInterface and cannot be replaced")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        reasons.append("it has cross-attention, whose keys are of another sequence")
    reasons += [f"it has a part with its own sequence, config.{name}" for name in getattr(config, "sub_configs", {})]
    strange = set(getattr(config, "layer_types", None) or ()) - set(LAYERS)
    if strange:
        reasons.append(f"layers of kind {', '.join(sorted(strange))}; supported: {', '.join(LAYERS)}")
    if getattr(model, "_is_stateful", False) or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        reasons.append("its tokens also meet outside of attention (a recurrence or a convolution)")
    if getattr(config, "attention_chunk_size", None):
        reasons.append(f"config.attention_chunk_size={config.attention_chunk_size}: chunked attention")
    if getattr(config, "output_router_logits", False):
        reasons.append("config.output_router_logits=True: that loss is no sum over tokens")
    if getattr(config, "output_attentions", False):
        reasons.append("config.output_attentions=True: attention weights are never formed")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        reasons.append("its forward takes no position_ids, so that every shard would begin at position 0")
    if reasons:
        raise NotImplementedError(f"{type(model).__name__} is not supported: {'; '.join(reasons)}")
