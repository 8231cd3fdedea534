"""Parameters and FLOPs against a plain count, and the shapes that tensor parallelism leaves."""

from __future__ import annotations

from math import prod

import pytest

from meshwright.errors import UserError
from meshwright.spec.flops import forward_flops, step_flops
from meshwright.spec.library import model
from meshwright.spec.parameters import ParameterSpec, layer_parameters, num_parameters


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
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


def test_names_are_unique():
    for layer in model("tiny-gpt2").layers:
        names = [parameter.name for parameter in layer_parameters(layer)]
        assert len(names) == len(set(names))


def test_padding_and_tying_are_not_counted():
    gpt2 = model("gpt2")
    listed = sum(p.num_elements for layer in gpt2.layers for p in layer_parameters(layer))
    extra_rows = gpt2.embedding.padded_vocab_size - gpt2.vocab_size
    assert extra_rows == 50304 - 50257
    assert listed - num_parameters(gpt2) == 768 * (2 * extra_rows + gpt2.vocab_size)


def test_block_flops_by_hand():
    """tiny-llama: hidden 64, 4 heads and 2 kv heads of 16, ffn 192, sequence 8."""
    seq = 8
    products = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 192), (64, 192), (192, 64)]
    flops = forward_flops(model("tiny-llama").layers[1], seq)
    assert flops.matmul_flops == sum(2 * seq * rows * columns for rows, columns in products)
    assert flops.attention_flops == 4 * (2 * seq * seq * 16 + 2 * seq * seq * 16)


def test_step_flops_are_near_six_per_parameter_and_token():
    """Without the embedding, and where attention is small beside the weights."""
    llama = model("llama-2-7b")
    weights = num_parameters(llama) - llama.vocab_size * 4096
    assert step_flops(llama, 128, 3) == pytest.approx(6 * weights * 128 * 3, rel=0.01)
