"""The price of a layer: every degree moves every term the right way."""

from __future__ import annotations

from itertools import pairwise

import pytest

from meshwright.cost.comm import collective_s
from meshwright.cost.compute import layer_compute
from meshwright.cost.layer import LayerCost, held_parameters, layer_cost, tied_sync_s
from meshwright.cost.movement import worst_group
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.library import cluster, model
from meshwright.spec.mesh import MeshShape
from meshwright.spec.model import LayerSpec
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.strategy import Strategy
from meshwright.spec.terms import PhaseSeconds

ONE_NODE, TWO_NODES = cluster("8xa100-sxm-40g"), cluster("2x8xa100-sxm-40g")
JOB = JobSpec(global_batch_size=16, seq_len=2048)
LLAMA, GPT2 = model("llama-2-7b"), model("gpt2")
BLOCKS = [LLAMA.layers[1], GPT2.layers[1]]
ALL_KINDS = [*LLAMA.layers[:2], LLAMA.layers[-1], *GPT2.layers[:2], GPT2.layers[-1]]
STRATEGIES = [
    Strategy(tp=8),
    Strategy(dp_replicate=8),
    Strategy(dp_shard=8, zero_stage=2),
    Strategy(dp_shard=8, zero_stage=3),
    Strategy(tp=2, dp_replicate=2, dp_shard=2, zero_stage=3, recompute="full"),
    Strategy(tp=2, dp_replicate=4, inner="dp"),
]


def price(layer: LayerSpec, strategy: Strategy, *, samples: int = 16, ranks: ClusterSpec = ONE_NODE) -> LayerCost:
    return layer_cost(layer, layer_parameters(layer), strategy, samples, JOB, ranks)


def terms(phase: PhaseSeconds) -> dict[str, float]:
    return {name: getattr(phase, name) for name in PhaseSeconds.model_fields}


@pytest.mark.parametrize("layer", BLOCKS, ids=["llama", "gpt2"])
def test_tensor_parallelism_holds_and_computes_less_but_communicates(layer: LayerSpec):
    costs = [price(layer, Strategy(tp=tp, dp_replicate=8 // tp)) for tp in (1, 2, 4)]
    for less, more in pairwise(costs):
        assert more.states.total_bytes < less.states.total_bytes
        assert more.micro_batch.forward.tp_s > less.micro_batch.forward.tp_s
        assert more.micro_batch.backward.tp_s > less.micro_batch.backward.tp_s
        assert more.step.optimizer_s < less.step.optimizer_s
    # The same samples on a rank: only then is less computed, since dp shrinks as tp grows.
    alone, split = (layer_compute(layer, tp, 2, JOB, ONE_NODE.device) for tp in (1, 4))
    assert split.forward_s < alone.forward_s
    assert costs[0].micro_batch.forward.tp_s == costs[0].micro_batch.backward.tp_s == 0


@pytest.mark.parametrize("layer", ALL_KINDS)
def test_sharding_saves_memory_and_costs_communication(layer: LayerSpec):
    replicated, zero2, zero3 = (price(layer, strategy) for strategy in STRATEGIES[1:4])
    assert replicated.states.total_bytes > zero2.states.total_bytes > zero3.states.total_bytes
    assert replicated.micro_batch.forward.zero_s == zero2.micro_batch.forward.zero_s == 0
    assert replicated.micro_batch.backward.zero_s == replicated.step.parameter_gather_s == 0

    def moved_s(cost: LayerCost) -> float:
        phases = (cost.micro_batch.forward, cost.micro_batch.backward)
        return sum(phase.zero_s + phase.hidden_s for phase in phases)

    assert 0 == moved_s(replicated) < moved_s(zero2) < moved_s(zero3)
    assert replicated.step.gradient_sync_s + replicated.step.hidden_s > 0
    assert zero3.step.gradient_sync_s == zero3.step.parameter_gather_s == 0
    assert zero2.step.parameter_gather_s + zero2.step.hidden_s > 0
    assert zero3.transient.gather_bytes > zero2.transient.gather_bytes == 0


@pytest.mark.parametrize("layer", BLOCKS, ids=["llama", "gpt2"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.label)
def test_recomputation_saves_activations_and_costs_a_forward_pass(layer: LayerSpec, strategy: Strategy):
    off, on = (price(layer, strategy.model_copy(update={"recompute": mode})) for mode in ("none", "full"))
    assert on.activation_bytes < off.activation_bytes
    assert on.states == off.states
    assert on.micro_batch.forward == off.micro_batch.forward
    before, after = terms(off.micro_batch.backward), terms(on.micro_batch.backward)
    assert after["recompute_s"] == on.micro_batch.forward.compute_s
    assert after["compute_s"] == before["compute_s"]
    repeated = after["tp_s"] - before["tp_s"]  # one of the two all-reduces of the forward pass
    assert repeated == pytest.approx(on.micro_batch.forward.tp_s / 2, rel=1e-12, abs=1e-15)
    assert on.micro_batch.backward.total_s > off.micro_batch.backward.total_s


@pytest.mark.parametrize("layer", ALL_KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.label)
def test_terms_are_not_negative_and_add_up(layer: LayerSpec, strategy: Strategy):
    cost = price(layer, strategy)
    for phase in (cost.micro_batch.forward, cost.micro_batch.backward):
        assert all(value >= 0 for value in terms(phase).values())
        assert phase.total_s == pytest.approx(sum(terms(phase).values()) - phase.hidden_s)
    step = {name: getattr(cost.step, name) for name in type(cost.step).model_fields}
    assert cost.step.total_s == pytest.approx(sum(step.values()) - cost.step.hidden_s)
    smaller = price(layer, strategy, samples=8)
    assert smaller.activation_bytes < cost.activation_bytes
    assert smaller.micro_batch.total_s < cost.micro_batch.total_s
    assert smaller.states == cost.states


def test_the_group_that_crosses_nodes_pays_the_network():
    tp_inside, tp_across = (Strategy(tp=2, dp_replicate=8, inner=inner) for inner in ("tp", "dp"))
    inside, across = (price(LLAMA.layers[1], strategy, ranks=TWO_NODES) for strategy in (tp_inside, tp_across))
    assert across.micro_batch.forward.tp_s > inside.micro_batch.forward.tp_s
    assert worst_group(MeshShape.of(tp_inside), "tp", 8) == (0, 1)
    assert worst_group(MeshShape.of(tp_across), "tp", 8) == (0, 8)
    assert worst_group(MeshShape.of(Strategy(tp=3, dp_replicate=2)), "tp", 4) == (3, 4, 5)


def test_a_tied_weight_is_held_once_on_one_stage_and_summed_across_stages():
    weight = 50304 * 768
    held = [sum(p.num_elements for p in held_parameters(GPT2, GPT2.layers[-1], stages)) for stages in (1, 2)]
    assert held == [2 * 768, 2 * 768 + weight]
    assert tied_sync_s(GPT2, Strategy(tp=4), 1, JOB, ONE_NODE) == 0
    assert tied_sync_s(LLAMA, Strategy(tp=4), 2, JOB, ONE_NODE) == 0
    assert tied_sync_s(GPT2, Strategy(tp=4), 2, JOB, ONE_NODE) == pytest.approx(
        collective_s("all_reduce", 4 * weight / 4, (0, 4), ONE_NODE), rel=1e-12
    )


def test_norms_over_split_heads_are_summed():
    block = LLAMA.layers[1]
    assert block.kind == "block"
    normed = block.model_copy(update={"attention": block.attention.model_copy(update={"qk_norm": True})})
    for strategy, synced in ((Strategy(tp=8), True), (Strategy(dp_shard=8, zero_stage=3), False)):
        plain, more = price(block, strategy), price(normed, strategy)
        assert (more.step.gradient_sync_s > plain.step.gradient_sync_s) == synced
