"""Makes small random Hugging Face models of the supported families, with `transformers` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "mixtral": MixtralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
}
# 4 experts, 2 for each token; inner widths that differ from those of a dense layer and from each other.
EXPERTS: dict[str, dict[str, object]] = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
}
# Windows shorter than the tests' sequences, caps that bend the scores and logits of these small models, a scale of the
# queries that is not that of the head size, and two kinds of layers that differ in window and rotary base.
ATTENTION: dict[str, dict[str, object]] = {
    "mistral": dict(sliding_window=4),
    "phi3": dict(sliding_window=6),
    "gemma2": dict(sliding_window=4, query_pre_attn_scalar=24, attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    "gemma3_text": dict(
        sliding_window=4,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


def make_tiny_model(family: str, *, seed: int = 0, scale: float = 4.0, **overrides: object) -> PreTrainedModel:
    """A model with 4 layers, 4 heads, 2 KV heads, vocabulary 130, in fp32.

    Weights are drawn `scale` times as wide as a fresh model's, so that the policy is far from uniform and wrong
    orders of rows or heads show in its output. Biases and norms are random too.
    """
    settings: dict[str, object] = dict(
        vocab_size=130,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )
    if family in ("qwen2", "qwen2_moe", "phi3"):
        settings.pop("head_dim")
    settings |= EXPERTS.get(family, {}) | ATTENTION.get(family, {}) | overrides
    torch.manual_seed(seed)
    options = {"experts_implementation": "eager"} if family in EXPERTS else {}  # the fused one has no fp64
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**settings), dtype=torch.float32, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 0.0 if name.endswith("bias") or family.startswith("gemma") else 1.0
                parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
    return model.eval()


class Float64Everywhere(TorchFunctionMode):
    """Makes `transformers` a true fp64 reference: its norms, softmax and angles ask for fp32 whatever the model is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def save_tiny_model(folder: Path, family: str, **overrides: object) -> PreTrainedModel:
    """Save a tiny model as a Hugging Face folder and return it."""
    model = make_tiny_model(family, **overrides)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return model


def save_tiny_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with two special tokens (258 tokens in all) and a chat template, saved into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)
