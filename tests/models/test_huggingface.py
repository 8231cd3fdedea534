"""Our models with the weights of transformers' modules compute what those modules compute."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.models import build_model
from meshwright.models.build import Transformer
from meshwright.models.loss import IGNORE_INDEX
from meshwright.spec.families import model_from_config
from tests.configs import GPT2, LLAMA, LLAMA3_ROPE

SIX_HEADS = LLAMA | {"num_attention_heads": 6}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
CASES = {
    "gpt2": ("gpt2", GPT2 | NO_DROPOUT),
    "gpt2-untied": ("gpt2", GPT2 | NO_DROPOUT | {"tie_word_embeddings": False, "n_inner": 100}),
    "llama": ("llama", SIX_HEADS),
    "llama-tied-biases": ("llama", SIX_HEADS | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}),
    "qwen2": ("qwen2", SIX_HEADS | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SIX_HEADS | {"head_dim": 16}),
}

# Patterns of their names and what ours are called; a GPT-2 block holds q, k and v in one matrix, inputs first.
LLAMA_NAMES = {
    r"model\.embed_tokens\.weight": "layers.0.token.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.(.*)": "layers.{}.norm1.{}",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(.*)": "layers.{}.attention.{}.{}",
    r"model\.layers\.(\d+)\.self_attn\.([qk]_norm)\.(.*)": "layers.{}.attention.{}.{}",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.(.*)": "layers.{}.attention.out.{}",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.(.*)": "layers.{}.norm2.{}",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.*)": "layers.{}.mlp.{}.{}",
    r"model\.norm\.(.*)": "layers.{last}.norm.{}",
    r"lm_head\.weight": "layers.{last}.output.weight",
}
GPT2_NAMES = {
    r"transformer\.wte\.weight": "layers.0.token.weight",
    r"transformer\.wpe\.weight": "layers.0.position.weight",
    r"transformer\.h\.(\d+)\.ln_(1|2)\.(.*)": "layers.{}.norm{}.{}",
    r"transformer\.h\.(\d+)\.attn\.c_attn\.(.*)": "layers.{}.attention.qkv.{}",
    r"transformer\.h\.(\d+)\.attn\.c_proj\.(.*)": "layers.{}.attention.out.{}",
    r"transformer\.h\.(\d+)\.mlp\.c_fc\.(.*)": "layers.{}.mlp.up.{}",
    r"transformer\.h\.(\d+)\.mlp\.c_proj\.(.*)": "layers.{}.mlp.down.{}",
    r"transformer\.ln_f\.(.*)": "layers.{last}.norm.{}",
    r"lm_head\.weight": "layers.{last}.output.weight",
}


def our_name(theirs: str, names: dict[str, str], num_blocks: int) -> str:
    for pattern, ours in names.items():
        if match := re.fullmatch(pattern, theirs):
            parts = list(match.groups())
            if parts and parts[0].isdigit():
                parts[0] = str(int(parts[0]) + 1)  # layer 0 is the embedding
            return ours.format(*parts, last=num_blocks + 1)
    raise AssertionError(f"{theirs} has no counterpart")


def translated(tensors: dict[str, Tensor], model_type: str, num_blocks: int) -> dict[str, Tensor]:
    """Return their weights (or gradients) under our names and in our layout, vocabulary not padded."""
    names = GPT2_NAMES if model_type == "gpt2" else LLAMA_NAMES
    found: dict[str, Tensor] = {}
    for theirs, tensor in tensors.items():
        name = our_name(theirs, names, num_blocks)
        if model_type == "gpt2" and name.endswith("weight") and ("attention" in name or "mlp" in name):
            tensor = tensor.T
        if "attention.qkv" in name:
            found |= {name.replace("qkv", part): t for part, t in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            found[name] = tensor
    return found


def build_both(model_type: str, fields: dict[str, Any]) -> tuple[nn.Module, Transformer]:
    """Return their module with random weights (biases and norms too) and ours with the same."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), attn_implementation="eager")
    theirs = theirs.float().train()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    spec = model_from_config({"model_type": model_type, **fields}, name="m", where="config.json")
    ours = build_model(spec, "cpu")
    own = dict(ours.named_parameters())
    given = translated(dict(theirs.named_parameters()), model_type, spec.num_blocks)
    assert given.keys() == own.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.fill_(7.0)  # padding must not matter
            parameter[tuple(slice(size) for size in given[name].shape)] = given[name]
    return theirs, ours


@pytest.mark.parametrize(("model_type", "fields"), CASES.values(), ids=CASES.keys())
def test_logits_loss_and_gradients_are_the_same(model_type: str, fields: dict[str, Any]):
    theirs, ours = build_both(model_type, fields)
    ids = torch.randint(0, 300, (3, 32))
    targets = torch.randint(0, 300, (3, 32)).masked_fill(torch.rand(3, 32) < 0.2, IGNORE_INDEX)
    expected = theirs(ids).logits
    assert torch.allclose(ours.logits(ids), expected, atol=1e-5, rtol=1e-5)

    expected_loss = nn.functional.cross_entropy(
        expected.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    loss = ours(ids, targets)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)

    expected_loss.backward()
    loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for name, gradient in translated(gradients, model_type, ours.spec.num_blocks).items():
        own = dict(ours.named_parameters())[name].grad
        assert own is not None, name
        inside = own[tuple(slice(size) for size in gradient.shape)]
        assert (inside - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
        assert own.norm() == pytest.approx(inside.norm().item(), rel=1e-6), "padding has no gradient"
