"""Seconds of uniform runs: pipelines against a hand-made schedule, terms by hand, and what more of anything costs."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from math import log2
from typing import Any

import pytest

from meshwright.cost.run_layers import Setting, block_seconds, embedding_seconds, head_seconds
from meshwright.cost.run_links import Links
from meshwright.cost.run_time import RunSeconds, StageSeconds, run_time
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.constants import Constants, shipped_constants
from meshwright.spec.library import cluster, model
from meshwright.spec.model import BlockLayer, LayerGroup, ModelSpec
from meshwright.spec.parts import ExpertsSpec
from meshwright.spec.run import HeldBytes, RunSpec, Software

A100, NODES = cluster("8xa100-sxm-80g"), cluster("4x8xa100-sxm-80g")
LLAMA = model("llama-2-7b")
CONSTANTS = shipped_constants()
TERMS = tuple(f.name for f in fields(RunSeconds) if f.name not in ("stages", "num_tokens", "ideal_s"))


def run_of(**changes: Any) -> RunSpec:
    base: dict[str, Any] = {
        "model": LLAMA,
        "cluster": A100,
        "framework": "megatron",
        "seq_len": 2048,
        "global_batch_size": 64,
        "micro_batch_size": 1,
    }
    return RunSpec(**{**base, **changes})


def seconds(constants: Constants | None = None, **changes: Any) -> RunSeconds:
    return run_time(run_of(**changes), constants)


def slowest(found: RunSeconds) -> StageSeconds:
    return max(found.stages, key=lambda stage: stage.total_s)


def one_forward_one_backward(stage: int, p: int, m: int) -> list[tuple[str, int, int]]:
    """(direction, micro-batch, chunk) in the order in which `stage` runs them."""
    warm = min(p - stage - 1, m)
    order = [("f", i, 0) for i in range(warm)]
    for i in range(m - warm):
        order += [("f", warm + i, 0), ("b", i, 0)]
    return order + [("b", i, 0) for i in range(m - warm, m)]


def interleaved(stage: int, p: int, m: int, v: int) -> list[tuple[str, int, int]]:
    """The order of arXiv 2104.04473, figure 4, below: micro-batches in groups of p, chunk by chunk."""
    groups = [range(begin, begin + p) for begin in range(0, m, p)]
    forward = [("f", i, chunk) for group in groups for chunk in range(v) for i in group]
    backward = [("b", i, chunk) for group in groups for chunk in reversed(range(v)) for i in group]
    warm = min(2 * (p - stage - 1) + (v - 1) * p, m * v)
    order = forward[:warm]
    for one, other in zip(forward[warm:], backward, strict=False):
        order += [one, other]
    return order + backward[m * v - warm :]


def finished_s(orders: list[list[tuple[str, int, int]]], v: int, forward_s: list[float]) -> float:
    """Run the orders as soon as what they wait for is done; a backward pass takes twice the forward one."""
    p, ends = len(orders), {}
    left, clocks = [list(order) for order in orders], [0.0] * len(orders)
    while any(left):
        for stage, order in enumerate(left):
            while order:
                direction, i, chunk = order[0]
                place = chunk * p + stage
                before = ("f", i, place - 1) if direction == "f" else ("b", i, place + 1)
                if direction == "b" and place == v * p - 1:
                    before = ("f", i, place)
                if (direction == "b" or place > 0) and before not in ends:
                    break
                takes_s = forward_s[stage] / v * (1 if direction == "f" else 2)
                clocks[stage] = max(clocks[stage], ends.get(before, 0.0)) + takes_s
                ends[direction, i, place] = clocks[stage]
                order.pop(0)
    return max(clocks)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 8)])
def test_equal_stages_take_what_a_schedule_takes(p: int, m: int):
    counted = finished_s([one_forward_one_backward(stage, p, m) for stage in range(p)], 1, [1.0] * p)
    assert counted == 3 * (m + p - 1)
    found = without_ends(pp=p, global_batch_size=m * 8 // p)
    slot_s = slowest(found).total_s
    assert found.micro_batches_s + found.bubble_s == pytest.approx(counted / 3 * slot_s, rel=1e-9)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 4)])
def test_interleaved_stages_take_what_their_schedule_takes(p: int, m: int, v: int):
    counted = finished_s([interleaved(stage, p, m, v) for stage in range(p)], v, [1.0] * p)
    assert counted == pytest.approx(3 * (m + (p - 1) / v))
    found = without_ends(pp=p, virtual_stages=v, global_batch_size=m * 8 // p)
    slot_s = slowest(found).total_s
    assert found.micro_batches_s + found.bubble_s == pytest.approx(counted / 3 * slot_s, rel=1e-9)


def test_a_slow_last_stage_paces_the_others():
    counted = finished_s([one_forward_one_backward(stage, 4, 12) for stage in range(4)], 1, [1.0, 1.0, 1.0, 1.5])
    assert counted == pytest.approx(3 * (12 * 1.5 + 3), rel=0.05), "closed form: m max c + sum c - max c"


def without_ends(**changes: Any) -> RunSeconds:
    """A model whose embedding and head weigh nothing, so that all stages are equal."""
    size = {"vocab_size": 128, "padded_vocab_size": 128}
    groups = tuple(
        group
        if isinstance(group.layer, BlockLayer)
        else group.model_copy(update={"layer": group.layer.model_copy(update=size)})
        for group in LLAMA.groups
    )
    found = seconds(model=LLAMA.model_copy(update={"groups": groups}), **changes)
    ends = [stage.embedding_s + stage.head_s for stage in found.stages]
    blocks = [stage.total_s - end for stage, end in zip(found.stages, ends, strict=True)]
    assert max(ends) < 0.02 * max(blocks)
    return with_stages(found, blocks, changes)


def with_stages(found: RunSeconds, blocks: list[float], changes: dict[str, Any]) -> RunSeconds:
    """The pipeline again with stages of blocks alone."""
    assert max(blocks) == pytest.approx(min(blocks), rel=1e-3)
    run = run_of(**changes)
    slot_s = slowest(found).total_s
    assert found.micro_batches_s == pytest.approx(run.num_micro_batches * slot_s)
    extra_s = (sum(stage.total_s for stage in found.stages) - slot_s) / run.virtual_stages
    assert found.bubble_s == pytest.approx(extra_s)
    equal_s = (run.pp - 1) * slot_s / run.virtual_stages
    return RunSeconds(
        **{name: getattr(found, name) for name in TERMS if name != "bubble_s"},
        bubble_s=equal_s,
        stages=found.stages,
        num_tokens=found.num_tokens,
        ideal_s=found.ideal_s,
    )


def test_terms_add_up():
    found = seconds(cluster=NODES, tp=2, pp=2, zero_stage=1)
    assert found.step_s == pytest.approx(sum(getattr(found, name) for name in TERMS))
    stage = found.stages[0]
    assert stage.total_s == pytest.approx(sum(getattr(stage, f.name) for f in fields(StageSeconds)))
    assert found.tokens_per_s == pytest.approx(64 * 2048 / found.step_s)
    assert 0.2 < found.mfu < 0.7


def ideal(**changes: Any) -> Setting:
    """A setting in which memory, launches and tails are free, so that only FLOPs count."""
    kind = CONSTANTS.devices[0]
    free = CONSTANTS.model_copy(
        update={
            "devices": (
                kind.model_copy(
                    update={
                        "constants": kind.constants.model_copy(
                            update={"matmul_efficiency": 0.5, "flash2_efficiency": 0.25, "memory_efficiency": 1.0}
                        )
                    }
                ),
            )
        }
    )
    device = A100.device.model_copy(update={"launch_s": 0.0, "memory_bytes_per_s": 1e30})
    return Setting.of(run_of(cluster=A100.model_copy(update={"device": device}), **changes), free)


def test_a_block_by_hand():
    setting = ideal(tp=4, micro_batch_size=2)
    block = LLAMA.layers[1]
    assert isinstance(block, BlockLayer)
    h, f, tokens, tail = 4096, 11008, 2 * 2048, 256 * 128 * 54
    rate = 0.5 * 312e12
    shapes = [(3 * h // 4, h), (h, h // 4), (2 * f // 4, h), (h, f // 4)]
    forward = sum(2 * (tokens * n + tail) * k / rate for n, k in shapes)
    backward = sum(2 * ((tokens * k + tail) * n + (n * k + tail) * tokens) / rate for n, k in shapes)
    core = 2 * tokens * 2048 * h / 4 / (0.25 * 312e12) * (2048 + 256) / 2048
    found = block_seconds(setting, block)
    assert found.forward.gemm_s == pytest.approx(forward, rel=1e-9)
    assert found.backward.gemm_s == pytest.approx(backward, rel=1e-9)
    assert found.forward.attention_s == pytest.approx(core, rel=1e-9)
    assert found.backward.attention_s == pytest.approx(2.5 / 0.86 * core, rel=1e-9)
    assert found.forward.memory_s == pytest.approx(0, abs=1e-12)
    links = Links.of(A100, CONSTANTS)
    assert found.forward.tp_s == pytest.approx(2 * links.all_reduce_s(2 * tokens * h, 4, 1))


def test_unfused_attention_computes_the_whole_square_and_moves_scores():
    flash, unfused = (ideal(software=Software(attention=kind)) for kind in ("flash2", "unfused"))
    block = LLAMA.layers[1]
    assert isinstance(block, BlockLayer)
    found = block_seconds(unfused, block).forward.attention_s
    assert found == pytest.approx(4 * 2048**2 * 4096 / unfused.attention_flops_per_s, rel=1e-6)
    assert found > block_seconds(flash, block).forward.attention_s


def test_head_sizes_off_the_tensor_cores_cost_more():
    def attention_s(num_heads: int, head_size: int) -> float:
        block = LLAMA.layers[1]
        assert isinstance(block, BlockLayer)
        heads = {"num_heads": num_heads, "num_kv_heads": num_heads, "head_size": head_size}
        changed = block.model_copy(update={"attention": block.attention.model_copy(update=heads)})
        setting = Setting.of(run_of(software=Software(attention="unfused")), CONSTANTS)
        return block_seconds(setting, changed).forward.attention_s

    assert attention_s(32, 132) > 2 * attention_s(32, 128)
    assert attention_s(32, 136) < 1.1 * attention_s(32, 128)


def test_embedding_and_head_by_hand():
    setting = ideal()
    vocab, tokens = LLAMA.head.padded_vocab_size, 2048
    tail = 256 * 128 * 54
    both = 2 * ((tokens * vocab + tail) * 4096 + (tokens * 4096 + tail) * vocab + (vocab * 4096 + tail) * tokens)
    assert head_seconds(setting).total_s == pytest.approx(both / (0.5 * 312e12), rel=1e-6)
    assert embedding_seconds(setting).total_s == pytest.approx(0, abs=1e-12)
    real = Setting.of(run_of(), CONSTANTS)
    assert embedding_seconds(real).total_s == pytest.approx(20 * tokens * 4096 / real.memory_bytes_per_s)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"recompute": "none"}, {"recompute": "attention"}),
        ({"recompute": "attention"}, {"recompute": "operators"}),
        ({"recompute": "operators"}, {"recompute": "full"}),
        ({"recompute": "full", "recompute_every": 2}, {"recompute": "full"}),
        ({"software": Software(operators="fused")}, {"software": Software(operators="eager")}),
        ({"software": Software(attention="flash2")}, {"software": Software(attention="flash1")}),
        ({"software": Software(clock=1.0)}, {"software": Software(clock=0.8)}),
        ({"software": Software(fp8="tensorwise")}, {"software": Software(fp8="rowwise")}),
        ({"software": Software(async_tp=True), "tp": 8}, {"tp": 8}),
        ({"software": Software(overlaps_tp_backward=True), "tp": 8}, {"tp": 8}),
        ({"software": Software(overlaps_gradients=True)}, {"software": Software(overlaps_gradients=False)}),
        ({"tp": 8, "sequence_parallel": True}, {"tp": 8}),
        ({"pp": 4, "virtual_stages": 2}, {"pp": 4}),
        ({"dropout": False}, {"dropout": True}),
        ({"global_batch_size": 64}, {"global_batch_size": 128}),
        ({"seq_len": 2048, "micro_batch_size": 2}, {"seq_len": 4096, "micro_batch_size": 1}),
        ({"micro_batch_size": 4, "global_batch_size": 128}, {"micro_batch_size": 1, "global_batch_size": 128}),
        ({"zero_stage": 2, "framework": "fsdp"}, {"zero_stage": 3, "framework": "fsdp"}),
    ],
)
def test_what_takes_longer(less: dict[str, Any], more: dict[str, Any]):
    """Four nodes of the same total batch: less work or better overlap is never slower."""
    assert seconds(cluster=NODES, **less).step_s < seconds(cluster=NODES, **more).step_s


def test_more_nodes_and_slower_networks_take_longer_for_the_same_work_a_rank():
    steps = [
        seconds(cluster=cluster(f"{nodes}x8xa100-sxm-80g"), global_batch_size=64 * nodes, zero_stage=1).step_s
        for nodes in (1, 2, 4, 16)
    ]
    assert all(one < other for one, other in pairwise(steps))
    slow = NODES.model_copy(
        update={"inter_node": NODES.inter_node.model_copy(update={"bytes_per_s": NODES.inter_node.bytes_per_s / 8})}
    )
    assert seconds(cluster=slow).step_s > seconds(cluster=NODES).step_s


def test_stragglers_cost_a_share_for_each_doubling_of_nodes():
    found = seconds(cluster=NODES)
    others = sum(getattr(found, name) for name in TERMS if name != "straggler_s")
    assert found.straggler_s == pytest.approx(others * CONSTANTS.straggler_share * log2(4))
    assert seconds(cluster=A100).straggler_s == 0.0


def test_sharded_parameters_are_gathered_for_every_micro_batch():
    def shards_s(num_micro_batches: int, zero_stage: int) -> float:
        found = seconds(
            cluster=NODES, framework="fsdp", zero_stage=zero_stage, global_batch_size=32 * num_micro_batches
        )
        assert found.gradients_s == found.parameters_s == 0.0
        return num_micro_batches * slowest(found).shards_s

    assert shards_s(4, 3) == pytest.approx(4 * shards_s(1, 3))
    assert shards_s(1, 3) > shards_s(1, 2) > 0


def test_gradients_hide_behind_the_last_backward_pass_only():
    exposed = seconds(cluster=NODES, software=Software(overlaps_gradients=False)).gradients_s
    hidden = seconds(cluster=NODES, software=Software(overlaps_gradients=True)).gradients_s
    links = Links.of(NODES, CONSTANTS)
    assert exposed == pytest.approx(links.all_reduce_s(4 * 6.74e9, 32, 1), rel=0.01), "the whole model in fp32"
    assert 0 < hidden < exposed


def test_each_framework_reduces_in_its_way():
    held = HeldBytes(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12, reduce_bytes=2)

    def end_s(framework: str, nodes: int) -> tuple[float, float]:
        found = seconds(
            cluster=cluster(f"{nodes}x8xa100-sxm-80g"),
            framework=framework,
            zero_stage=1,
            held=held,
            software=Software(overlaps_gradients=False),
            global_batch_size=8 * nodes,
        )
        return found.gradients_s, found.parameters_s

    scattered, summed, broadcast = (end_s(name, 4) for name in ("megatron", "deepspeed", "internevo"))
    assert summed[0] == pytest.approx(2 * scattered[0], rel=0.05)
    assert summed[1] == pytest.approx(scattered[1])
    assert broadcast[0] == summed[0]
    assert end_s("internevo", 32)[1] > 2 * end_s("deepspeed", 32)[1], "one broadcast for each of 256 owners"


def test_tensor_parallel_ranks_are_out_of_step_under_deepspeeds_pipeline():
    def engine_s(framework: str, tp: int, pp: int = 2) -> float:
        return seconds(cluster=NODES, framework=framework, tp=tp, pp=pp, global_batch_size=64).engine_s

    assert engine_s("megatron", 8) == engine_s("megatron-deepspeed", 1) == engine_s("megatron-deepspeed", 8, 1) == 0
    slots = 64 // 2 + 1  # 2 replicas
    assert engine_s("megatron-deepspeed", 8) == pytest.approx(slots * 16 * 3 * CONSTANTS.engine_skew_s)


def test_groups_use_the_network_of_all_members_in_a_node():
    links = Links.of(NODES, CONSTANTS)
    inside = NODES.intra_node.bytes_per_s * CONSTANTS.nvlink_efficiency
    card = NODES.inter_node.bytes_per_s * CONSTANTS.nic_efficiency
    assert links.link(8, 1)[0] == links.link(2, 4)[0] == inside
    assert links.link(16, 1)[0] == pytest.approx(min(inside, 8 * card))
    assert links.link(8, 4)[0] == pytest.approx(2 * card), "2 of 8 in each node"
    assert links.link(4, 8)[0] == pytest.approx(card)
    assert links.all_reduce_s(1e9, 1, 1) == links.gather_s(1e9, 1, 1) == links.exchange_s(1e9, 1, 1) == 0
    assert links.send_s(1e9, 8) > links.send_s(1e9, 1)


def test_devices_that_were_not_fitted_have_their_own_efficiencies():
    named = {"name": "something-new"}
    unknown = A100.model_copy(update={"device": A100.device.model_copy(update=named)})
    constants = CONSTANTS.of(unknown.device)
    assert not CONSTANTS.is_fitted(unknown.device)
    assert constants.matmul_efficiency == unknown.device.matmul_efficiency
    assert Links.of(unknown, CONSTANTS).inside_bytes_per_s == pytest.approx(
        unknown.intra_node.bytes_per_s * unknown.intra_node.efficiency
    )
    assert seconds(cluster=unknown).step_s > 0


def sparse(num_experts: int, top_k: int) -> ModelSpec:
    block = LLAMA.layers[1]
    assert isinstance(block, BlockLayer)
    experts = ExpertsSpec(num_experts=num_experts, top_k=top_k)
    mlp = block.mlp.model_copy(update={"ffn_size": 2752, "experts": experts})
    groups = tuple(
        LayerGroup(num_layers=8, layer=block.model_copy(update={"mlp": mlp})) if g.layer.kind == "block" else g
        for g in LLAMA.groups
    )
    return LLAMA.model_copy(update={"groups": groups})


def test_experts_cost_by_visits_and_talk_when_spread():
    alone = seconds(model=sparse(8, 2))
    assert slowest(alone).ep_s == 0
    spread = seconds(model=sparse(8, 2), ep=8)
    assert slowest(spread).ep_s > 0
    assert slowest(seconds(model=sparse(8, 4), ep=8)).ep_s == pytest.approx(2 * slowest(spread).ep_s, rel=0.15)
    assert slowest(seconds(model=sparse(8, 4))).gemm_s > slowest(alone).gemm_s
    assert spread.optimizer_s < alone.optimizer_s, "each rank updates its own experts"
    assert slowest(seconds(model=sparse(64, 2))).gemm_s > slowest(alone).gemm_s, "many small products"


def test_long_contexts_are_shared_and_the_ring_hides_behind_attention():
    long = {"seq_len": 32768, "global_batch_size": 8}
    whole, shared = seconds(**long), seconds(**long, cp=8)
    assert slowest(shared).attention_s == pytest.approx(slowest(whole).attention_s / 8)
    assert slowest(shared).cp_s == 0
    slow = A100.model_copy(update={"intra_node": A100.intra_node.model_copy(update={"bytes_per_s": 1e9})})
    assert slowest(seconds(cluster=slow, **long, cp=8)).cp_s > 0


def test_more_of_a_rate_is_never_slower():
    def changed(name: str) -> ClusterSpec:
        return NODES.model_copy(
            update={"device": NODES.device.model_copy(update={name: 2 * getattr(NODES.device, name)})}
        )

    base = seconds(cluster=NODES, tp=2, zero_stage=1).step_s
    for name in ("bf16_flops_per_s", "memory_bytes_per_s"):
        assert seconds(cluster=changed(name), tp=2, zero_stage=1).step_s < base
