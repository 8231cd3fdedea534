"""Small config.json contents of the model families."""

from __future__ import annotations

from typing import Any

GPT2: dict[str, Any] = {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 32, "vocab_size": 300}
LLAMA: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 300,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MISTRAL: dict[str, Any] = LLAMA | {"sliding_window": 16}
MIXTRAL: dict[str, Any] = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
BERT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 300,
}
T5: dict[str, Any] = {"d_model": 48, "d_kv": 16, "d_ff": 80, "num_layers": 3, "num_heads": 4, "vocab_size": 300}
VIT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
SWIN: dict[str, Any] = {
    "embed_dim": 16,
    "depths": [2, 3, 1],
    "num_heads": [2, 4, 4],
    "window_size": 4,
    "image_size": 32,
    "patch_size": 2,
}
