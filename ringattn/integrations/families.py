"""Tiny transformers models with random weights, one a family: what tests and benchmarks compare one rank and many on.

Each holds what its family brings to attention: grouped heads, windows on some layers, softcap, sinks that matter,
latent heads with Dv != D, rotary embeddings that look at the whole sequence, two directions.
"""

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 96
WINDOW = 5

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GROUPED = dict(num_key_value_heads=2)
_ALTERNATING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
_GEMMA = dict(**_GROUPED, **_ALTERNATING, head_dim=8, query_pre_attn_scalar=16)
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
_LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
_ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16)
_LONGROPE = dict(
    type="longrope",  # "rope_type" is refused before transformers 5
    short_factor=[1.0] * 4,
    long_factor=[4.0, 3.0, 2.0, 1.0],
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "llama-dynamic": (
        "LlamaConfig",
        dict(**_GROUPED, max_position_embeddings=16, rope_scaling=dict(rope_type="dynamic", factor=4.0)),
    ),
    "qwen3": ("Qwen3Config", dict(**_GROUPED, head_dim=16)),
    "mistral": ("MistralConfig", dict(**_GROUPED, sliding_window=WINDOW)),
    "gemma2": ("Gemma2Config", dict(**_GEMMA, attn_logit_softcapping=2.0)),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "gpt-oss": ("GptOssConfig", dict(**_GROUPED, **_ALTERNATING, **_EXPERTS, head_dim=8, rope_scaling=_YARN)),
    "deepseek-v3": (
        "DeepseekV3Config",
        dict(**_LATENT, **_ROUTED, num_key_value_heads=4, first_k_dense_replace=1),
    ),
    "phi3-longrope": (
        "Phi3Config",
        dict(**_GROUPED, max_position_embeddings=64, original_max_position_embeddings=16, rope_scaling=_LONGROPE),
    ),
    "modernbert": (
        "ModernBertConfig",
        dict(local_attention=2 * WINDOW, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    ),
}
"""By name: the class of a configuration, and what differs in it from the sizes that all share."""


def plain_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention by its formula under transformers' own masks, in the dtype of its inputs.

    What transformers calls "eager" rounds its softmax to float32, so that its float64 result is no reference.
    """
    share = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(share, dim=1).transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if attention_mask is None else scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(share, dim=1)).transpose(1, 2).contiguous(), None


def make_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of a family in training mode, with the same weights on every rank and in every dtype.

    Args:
        name: a key of `FAMILIES`.
        dtype: of all parameters.
        seed: of the weights.
    """
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.masking_utils import eager_mask

    kind: Any = AutoModelForMaskedLM if name == "modernbert" else AutoModelForCausalLM
    config_name, differing = FAMILIES[name]
    config = getattr(transformers, config_name)(**{**_SIZES, **differing})

    AttentionInterface.register("plain", plain_attention)
    AttentionMaskInterface.register("plain", eager_mask)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Grouped matrix products, the default for experts where there is a choice, take no float64.
        choice = hasattr(transformers.PreTrainedModel, "_can_set_experts_implementation")
        experts = dict(experts_implementation="eager") if choice else {}
        model = kind.from_config(config, attn_implementation="plain", **experts)
        for parameter_name, parameter in model.named_parameters():
            with torch.no_grad():
                # Larger than a fresh model's, so that attention is not uniform; sinks that a missing one would show.
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.15)
                elif "sinks" in parameter_name:
                    parameter.normal_(2, 1)
    return model.to(dtype)


def make_batch(name: str, rows: int = 2, tokens: int = 37, seed: int = 1) -> dict[str, Tensor]:
    """Token ids and labels for a family; a third of the labels is left out, more of them at the end.

    Args:
        name: a key of `FAMILIES`.
        rows, tokens: shape of the batch.
        seed: of the tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    labels = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator) if name == "modernbert" else ids.clone()
    labels[torch.rand(rows, tokens, generator=generator) < torch.linspace(0, 0.66, tokens)] = -100
    return {"input_ids": ids, "labels": labels}
