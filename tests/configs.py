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
