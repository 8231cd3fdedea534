"""Our models with the weights of transformers' modules compute what those modules compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

from meshwright.errors import UserError
from meshwright.models import build_model
from meshwright.models.build import Transformer
from meshwright.models.loss import IGNORE_INDEX
from meshwright.models.names import checkpoint_tensors, names_in_file
from meshwright.spec.families import model_from_config
from meshwright.spec.model import ModelSpec
from tests.configs import BERT, GPT2, LLAMA, LLAMA3_ROPE, MISTRAL, SWIN, T5, VIT

NUM_SAMPLES, SEQ_LEN, TARGET_SEQ_LEN = 3, 32, 21
SIX_HEADS = LLAMA | {"num_attention_heads": 6}
NO_DROPOUT = {
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout_rate": 0.0,
    "drop_path_rate": 0.0,
}
CLASSES = {f"c{i}": i for i in range(5)}
FIVE_CLASSES = {"label2id": CLASSES, "id2label": {i: name for name, i in CLASSES.items()}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-untied": ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False, "n_inner": 100}),
    "llama": ("LlamaForCausalLM", SIX_HEADS),
    "llama-tied-biases": (
        "LlamaForCausalLM",
        SIX_HEADS | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": ("LlamaForCausalLM", LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}),
    "qwen2": ("Qwen2ForCausalLM", SIX_HEADS | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", SIX_HEADS | {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", MISTRAL),
    "mistral-all-seen": ("MistralForCausalLM", MISTRAL | {"sliding_window": SEQ_LEN}),
    "bert": ("BertForMaskedLM", BERT),
    "bert-untied": ("BertForMaskedLM", BERT | {"tie_word_embeddings": False, "hidden_act": "relu"}),
    "bert-classes": ("BertForSequenceClassification", BERT | FIVE_CLASSES),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-gated": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2}),
    "t5-untied": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 1},
    ),
    "vit": ("ViTForImageClassification", VIT | FIVE_CLASSES),
    "vit-no-bias": ("ViTForImageClassification", VIT | {"qkv_bias": False, "hidden_act": "gelu_pytorch_tanh"}),
    "swin": ("SwinForImageClassification", SWIN | FIVE_CLASSES),
    "swin-odd": ("SwinForImageClassification", SWIN | {"window_size": 3, "image_size": 24, "depths": [2, 4, 2]}),
}


def build_theirs(name: str) -> tuple[nn.Module, ModelSpec]:
    """Return their module with random weights (biases and norms too), and our description of it."""
    architecture, fields = CASES[name]
    model_type = name.split("-")[0].rstrip("3") if name.startswith("llama") else name.split("-")[0]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields, **NO_DROPOUT)
    config._attn_implementation = "eager"
    theirs = getattr(transformers, architecture)(config).float().train()
    if name == "t5-untied":
        # This version ties whatever the file says; those that published such files did not.
        theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    described = {"model_type": model_type, "architectures": [architecture], **fields}
    return theirs, model_from_config(described, name=name, where="config.json")


def translated(tensors: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Return their weights (or gradients) under our names and in our layout."""
    file_names = names_in_file(spec, tensors)
    return {
        ours: part
        for tensor in checkpoint_tensors(spec)
        for ours, part in zip(tensor.ours, tensor.to_ours(tensors[file_names[tensor.name]]), strict=True)
    }


def build_ours(weights: dict[str, Tensor], spec: ModelSpec) -> Transformer:
    """Return our module with `weights`, and where these have padding something that must not matter."""
    ours = build_model(spec, "cpu")
    own = dict(ours.named_parameters())
    assert weights.keys() == own.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
            if spec.vocab_size and len(parameter) > spec.vocab_size:
                parameter[spec.vocab_size :] = 7.0
    return ours


def make_inputs(spec: ModelSpec) -> tuple[dict[str, Tensor], Tensor]:
    """Return what to call their module with, in our order too, and targets."""
    if spec.fixed_seq_len:
        size = spec.embedding.image_size  # pyright: ignore[reportAttributeAccessIssue]
        return {"pixel_values": torch.randn(NUM_SAMPLES, 3, size, size)}, torch.randint(0, 2, (NUM_SAMPLES,))
    inputs = {"input_ids": torch.randint(0, 300, (NUM_SAMPLES, SEQ_LEN))}
    if spec.has_targets:
        inputs["decoder_input_ids"] = torch.randint(0, 300, (NUM_SAMPLES, TARGET_SEQ_LEN))
    elif spec.family == "bert":
        inputs["token_type_ids"] = torch.randint(0, 2, (NUM_SAMPLES, SEQ_LEN))
    if spec.head.kind == "classifier":
        return inputs, torch.tensor([4, IGNORE_INDEX, 1])
    shape = (NUM_SAMPLES, TARGET_SEQ_LEN if spec.has_targets else SEQ_LEN)
    return inputs, torch.randint(0, 300, shape).masked_fill(torch.rand(shape) < 0.2, IGNORE_INDEX)


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_are_the_same(name: str):
    theirs, spec = build_theirs(name)
    ours = build_ours(translated(dict(theirs.named_parameters(remove_duplicate=False)), spec), spec)
    inputs, targets = make_inputs(spec)
    expected = theirs(**inputs).logits
    logits = ours.logits(*inputs.values())
    assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-5)

    expected_loss = nn.functional.cross_entropy(
        expected.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    loss = ours(*inputs.values(), targets)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)

    expected_loss.backward()
    loss.backward()
    their_gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in theirs.named_parameters(remove_duplicate=False)
    }
    gradients = translated(their_gradients, spec)
    for parameter, own in ours.named_parameters():
        gradient = gradients[parameter]  # zero where the vocabulary is padded
        assert own.grad is not None, parameter
        assert (own.grad - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, parameter


def test_without_token_types_all_are_of_the_first():
    theirs, spec = build_theirs("bert")
    ours = build_ours(translated(dict(theirs.named_parameters()), spec), spec)
    ids = torch.randint(0, 300, (NUM_SAMPLES, SEQ_LEN))
    assert torch.allclose(ours.logits(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_their_files_are_read_and_written(name: str, tmp_path: Path):
    theirs, spec = build_theirs(name)
    theirs.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    file = load_file(tmp_path / "model.safetensors")
    found = names_in_file(spec, file)
    tensors = checkpoint_tensors(spec)
    assert [name for name in found if found[name] != name] == [], "the names that transformers writes go first"
    written: dict[str, Tensor] = {}
    for tensor in tensors:
        back = tensor.to_theirs(tensor.to_ours(file[tensor.name]))
        written |= dict.fromkeys((tensor.name, *tensor.copies), back)
    assert written.keys() == file.keys()
    assert all(torch.equal(written[name], file[name]) for name in found)


def test_other_names_are_known():
    for name, renamed in {
        "gpt2": {"transformer.h.0.ln_1.weight": "h.0.ln_1.weight", "": "h.0.attn.bias", "same": "lm_head.weight"},
        "bert": {
            "bert.embeddings.LayerNorm.weight": "bert.embeddings.LayerNorm.gamma",
            "cls.predictions.bias": "cls.predictions.decoder.bias",
            "": "bert.pooler.dense.weight",
            "same": "cls.predictions.decoder.weight",
        },
        "t5": {"shared.weight": "decoder.embed_tokens.weight", "same": "lm_head.weight"},
        "vit": {"vit.encoder.layer.0.attention.attention.query.weight": "vit.layers.0.attention.q_proj.weight"},
        "swin": {
            "swin.layernorm.bias": "layernorm.bias",
            "": "swin.encoder.layers.0.blocks.0.attention.self.relative_position_index",
        },
    }.items():
        spec = build_theirs(name)[1]
        names = {tensor.name: tensor.name for tensor in checkpoint_tensors(spec)} | renamed
        found = names_in_file(spec, names.values())
        assert found == {key: value for key, value in names.items() if key not in ("", "same")}


def test_what_a_file_lacks_or_has_too_much_is_said():
    spec = build_theirs("llama")[1]
    names = [tensor.name for tensor in checkpoint_tensors(spec)]
    with pytest.raises(UserError, match=r"^checkpoint of llama: model\.norm\.weight: is missing$"):
        names_in_file(spec, [name for name in names if name != "model.norm.weight"])
    with pytest.raises(UserError, match=r"^checkpoint of llama: score\.weight: is not a tensor of this model$"):
        names_in_file(spec, [*names, "score.weight"])
    with pytest.raises(UserError, match=r"^model\.norm\.weight: has shape \(3,\), but the model's is \(48,\)$"):
        next(t for t in checkpoint_tensors(spec) if t.name == "model.norm.weight").to_ours(torch.zeros(3))
