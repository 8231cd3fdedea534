"""Parameters and FLOPs against a plain count, and the shapes that tensor parallelism leaves."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.spec.flops import forward_flops, step_flops
from meshwright.spec.library import model
from meshwright.spec.model import (
    BlockLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerGroup,
    ModelSpec,
    pad_vocab,
)
from meshwright.spec.parameters import ParameterSpec, layer_parameters, num_parameters
from meshwright.spec.parts import AttentionSpec, ExpertsSpec, LatentSpec, MlpSpec
from meshwright.spec.tensors import Lengths


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-swin"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_shards_make_up_the_whole(name: str, tp: int):
    for layer in model(name).layers:
        for parameter in layer_parameters(layer):
            copies = tp if parameter.tp_dim is not None else 1
            assert prod(parameter.local_shape(tp)) * copies == parameter.num_elements


def test_a_degree_that_does_not_divide():
    parameter = ParameterSpec(name="attention.q.weight", shape=(6, 4), tp_dim=0)
    with pytest.raises(UserError, match=r"attention\.q\.weight: dimension 0 over tp: 6 is not divisible by 4"):
        parameter.local_shape(4)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-swin"])
def test_names_are_unique(name: str):
    for layer in model(name).layers:
        names = [parameter.name for parameter in layer_parameters(layer)]
        assert len(names) == len(set(names))


def test_padding_and_tying_are_not_counted():
    gpt2 = model("gpt2")
    listed = sum(p.num_elements for layer in gpt2.layers for p in layer_parameters(layer))
    assert isinstance(gpt2.embedding, EmbeddingLayer)
    extra_rows = gpt2.embedding.padded_vocab_size - gpt2.vocab_size
    assert extra_rows == 50304 - 50257
    assert listed - num_parameters(gpt2) == 768 * (2 * extra_rows + gpt2.vocab_size)


def test_block_flops_by_hand():
    """tiny-llama: hidden 64, 4 heads and 2 kv heads of 16, ffn 192, sequence 8."""
    seq = 8
    products = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 192), (64, 192), (192, 64)]
    flops = forward_flops(model("tiny-llama").layers[1], Lengths(seq))
    assert flops.matmul_flops == sum(2 * seq * rows * columns for rows, columns in products)
    assert flops.attention_flops == 4 * (2 * seq * seq * 16 + 2 * seq * seq * 16)


def test_step_flops_are_near_six_per_parameter_and_token():
    """Without the embedding, and where attention is small beside the weights."""
    llama = model("llama-2-7b")
    weights = num_parameters(llama) - llama.vocab_size * 4096
    assert step_flops(llama, Lengths(128), 3) == pytest.approx(6 * weights * 128 * 3, rel=0.01)


def _model(blocks: list[tuple[int, BlockLayer]], vocab_size: int) -> ModelSpec:
    hidden = blocks[0][1].hidden_size
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "vocab_size": vocab_size,
        "padded_vocab_size": pad_vocab(vocab_size),
    }
    return ModelSpec(
        name="test",
        family="llama",
        groups=(
            LayerGroup(num_layers=1, layer=EmbeddingLayer(**sizes)),
            *(LayerGroup(num_layers=count, layer=block) for count, block in blocks),
            LayerGroup(num_layers=1, layer=HeadLayer(norm="rmsnorm", norm_eps=1e-6, **sizes)),
        ),
    )


def test_a_published_mixture_of_experts():
    """Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9 (arXiv 2401.04088, section 2)."""
    block = BlockLayer(
        hidden_size=4096,
        norm="rmsnorm",
        norm_eps=1e-5,
        attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, rotary=True),
        mlp=MlpSpec(ffn_size=14336, gated=True, activation="silu", experts=ExpertsSpec(num_experts=8, top_k=2)),
    )
    mixtral = _model([(32, block)], 32000)
    assert num_parameters(mixtral) == 46_702_792_704
    met = num_parameters(mixtral) - 32 * 6 * 3 * 4096 * 14336
    assert met == pytest.approx(12.9e9, rel=0.005)
    assert step_flops(mixtral, Lengths(128), 1) == pytest.approx(6 * (met - 32000 * 4096) * 128, rel=0.01)


def test_a_published_model_with_latent_attention():
    """DeepSeek-V2: 236 billion parameters, of which a token meets 21 (arXiv 2405.04434, section 3.1.2)."""
    dense = BlockLayer(
        hidden_size=5120,
        norm="rmsnorm",
        norm_eps=1e-6,
        attention=AttentionSpec(
            num_heads=128,
            num_kv_heads=128,
            head_size=192,
            rotary=True,
            latent=LatentSpec(query_rank=1536, kv_rank=512, rope_size=64, value_size=128),
        ),
        mlp=MlpSpec(ffn_size=12288, gated=True, activation="silu"),
    )
    experts = ExpertsSpec(num_experts=160, top_k=6, shared_ffn_size=3072)
    sparse = dense.model_copy(update={"mlp": MlpSpec(ffn_size=1536, gated=True, activation="silu", experts=experts)})
    deepseek = _model([(1, dense), (59, sparse)], 102400)
    assert num_parameters(deepseek) == 235_741_434_880
    met = num_parameters(deepseek) - 59 * 154 * 3 * 5120 * 1536
    assert met == pytest.approx(21e9, rel=0.03)


def test_queries_without_a_latent_come_straight_from_the_hidden_states():
    """DeepSeek-V2-Lite, appendix B: no query compression; 16 heads of 128 + 64."""
    attention = AttentionSpec(
        num_heads=16,
        num_kv_heads=16,
        head_size=192,
        rotary=True,
        latent=LatentSpec(query_rank=0, kv_rank=512, rope_size=64, value_size=128),
    )
    block = model("tiny-llama").layers[1].model_copy(update={"hidden_size": 2048, "attention": attention})
    shapes = {p.name: p.shape for p in layer_parameters(block) if p.name.startswith("attention.")}
    assert shapes == {
        "attention.q.weight": (3072, 2048),
        "attention.kv_a.weight": (576, 2048),
        "attention.kv_a_norm.weight": (512,),
        "attention.kv_b.weight": (4096, 512),
        "attention.out.weight": (2048, 2048),
    }
    flops = forward_flops(block, Lengths(8))
    assert flops.attention_flops == 2 * 8 * 8 * 16 * (192 + 128)
