"""Small random models of real architectures: the same code paths as the real ones, in milliseconds."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

COMMON = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def tiny_llama(heads=6, kv_heads=2, head_dim=16, **overrides):
    shape = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": 16 * heads,
    }
    return build(LlamaConfig(**(COMMON | shape | overrides)))


def tiny_qwen2(heads=14, kv_heads=2, **overrides):
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 16 * heads}
    return build(Qwen2Config(**(COMMON | shape | overrides)))


def tiny_gemma3(window=9, **overrides):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": window,
        "layer_types": types,
    }  # fmt: skip
    return build(Gemma3TextConfig(**(COMMON | shape | overrides)))


def tiny_gemma2(window=7, **overrides):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": window,
        "layer_types": types, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 16,
    }  # fmt: skip
    return build(Gemma2Config(**(COMMON | shape | overrides)))


def build(config, seed=0, sharpness=6):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        # Freshly initialised attention is almost uniform, which would hide mistakes in it.
        if "q_proj" in name or "k_proj" in name:
            with torch.no_grad():
                parameter.mul_(sharpness) if parameter.ndim == 2 else parameter.normal_(0, sharpness / 6)
    return model


def save_tokenizer(folder):
    words = {f"w{index}": index for index in range(97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def save(model, folder):
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
