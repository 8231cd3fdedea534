"""Memory of uniform runs against arithmetic written out by hand and against published formulas."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.memory import activation_bytes
from meshwright.cost.run_memory import (
    RunBytes,
    StageBytes,
    communicators,
    micro_batches_in_flight,
    run_memory,
)
from meshwright.cost.run_memory_layers import kept_bytes, recomputed_bytes, saved_bytes
from meshwright.cost.run_memory_states import held_totals, local_parameters, stage_parameters
from meshwright.cost.run_stages import stages_of
from meshwright.spec.job import JobSpec
from meshwright.spec.library import model
from meshwright.spec.memory import shipped_memory
from meshwright.spec.model import BlockLayer
from meshwright.spec.parts import AttentionSpec, ExpertsSpec, LatentSpec, MlpSpec
from meshwright.spec.run import HeldBytes, RunSpec, Software
from meshwright.spec.strategy import Strategy
from tests.runs import HEADS, HIDDEN, VOCAB, gpt, make_run, of_blocks

SEQ = 2048
UNFUSED, FLASH = Software(attention="unfused", loss="vocab_parallel"), Software(loss="vocab_parallel")
LOG_SUM_EXPS = 4 * HEADS


def block_of(run: RunSpec) -> BlockLayer:
    return next(layer for layer in run.model.layers if isinstance(layer, BlockLayer))


def saved(run: RunSpec) -> float:
    return saved_bytes(run, block_of(run)).total_bytes


def llama_block(**mlp: Any) -> BlockLayer:
    return BlockLayer(
        hidden_size=4096,
        norm="rmsnorm",
        norm_eps=1e-5,
        attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, rotary=True),
        mlp=MlpSpec(ffn_size=14336, gated=True, activation="silu", **mlp),
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_activations_of_korthikanti(tp: int):
    """arXiv 2205.05198, table 2: per token 34 h + 5 a s; 10 h + (24 h + 5 a s) / t; (34 h + 5 a s) / t."""
    h, scores = HIDDEN, 5 * HEADS * SEQ
    run = make_run(tp=tp, dropout=True, software=UNFUSED)
    assert saved(run) == pytest.approx(10 * h + (24 * h + scores) / tp)
    if tp > 1:
        parallel = run.model_copy(update={"sequence_parallel": True})
        assert saved(parallel) == pytest.approx((34 * h + scores) / tp)
    selective = run.model_copy(update={"recompute": "attention"})
    assert kept_bytes(selective, block_of(run)) == pytest.approx(10 * h + 24 * h / tp)
    assert recomputed_bytes(selective, block_of(run)) == pytest.approx(scores / tp)
    full = run.model_copy(update={"recompute": "full"})
    assert kept_bytes(full, block_of(run)) == 2 * h
    assert recomputed_bytes(full, block_of(run)) == saved(run) - 2 * h


def test_recomputing_every_other_layer_keeps_half_of_the_rest():
    run = make_run(recompute="full", recompute_every=2)
    assert kept_bytes(run, block_of(run)) == (2 * HIDDEN + saved(make_run())) / 2


def test_flash_attention_keeps_no_scores():
    assert saved(make_run(software=FLASH)) == 8 * HIDDEN + 8 * HIDDEN + LOG_SUM_EXPS + 16 * HIDDEN
    # A head of 50 is padded to 56, and its output copied without the padding.
    odd = make_run(model=gpt(hidden=1600, heads=32), software=FLASH, dropout=True)
    assert saved(odd) == pytest.approx(10 * 1600 + 8 * 1600 * 56 / 50 + 2 * 1600 + 4 * 32 + 16 * 1600)


def test_activations_of_a_gated_block():
    """Megatron's fused SwiGLU keeps 6 f, eager PyTorch 8 f and 24 h of norms, a compiled block 8 h and 6 f."""
    llama = of_blocks([(8, llama_block())])
    h, f, core = 4096, 14336, 2 * (4096 + 2 * 1024) + 2 * 4096 + 4 * 32
    fused = make_run(model=llama)
    assert saved(fused) == 8 * h + core + 6 * f
    assert saved(fused.model_copy(update={"tp": 4, "sequence_parallel": True})) == (8 * h + core + 6 * f) / 4
    eager, compiled = Software(operators="eager"), Software(operators="fused")
    assert saved(make_run(model=llama, framework="fsdp", software=eager)) == 24 * h + core + 8 * f
    assert saved(make_run(model=llama, framework="fsdp", software=compiled)) == 8 * h + core + 6 * f


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b"])
@pytest.mark.parametrize("tp", [1, 2])
def test_plans_and_runs_count_alike(name: str, tp: int):
    """What a plan's layer keeps (cost/memory.py) is what a run of this project's runtime keeps, but for norms' rows."""
    spec = model(name)
    block = spec.layers[1]
    job = JobSpec(global_batch_size=8, seq_len=1024)
    run = make_run(model=spec, framework="meshwright", tp=tp, seq_len=1024, software=Software(operators="fused"))
    assert isinstance(block, BlockLayer)
    of_plan = activation_bytes(block, Strategy(tp=tp), 1, job, "cuda_fused")
    assert 1024 * saved_bytes(run, block).total_bytes == pytest.approx(of_plan, rel=0.002)


def test_what_a_per_operator_policy_keeps():
    """The input, q, v, attention's output and the first product of the MLP; in eager mode its last one too."""
    run = make_run(model=of_blocks([(8, llama_block())]), framework="torchtitan", recompute="operators")
    compiled = 2 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 4096 + 2 * 14336
    assert kept_bytes(run, block_of(run)) == compiled
    eager = run.model_copy(update={"software": Software(operators="eager")})
    assert kept_bytes(eager, block_of(run)) == compiled + 2 * 4096


def test_activations_of_experts_and_latent_attention():
    """DeepSeek-V2 (arXiv 2405.04434): heads of 128 + 64, values of 128, ranks 1536 and 512; 6 experts of 1536."""
    latent = LatentSpec(query_rank=1536, kv_rank=512, rope_size=64, value_size=128)
    block = BlockLayer(
        hidden_size=5120,
        norm="rmsnorm",
        norm_eps=1e-6,
        attention=AttentionSpec(num_heads=128, num_kv_heads=128, head_size=192, rotary=True, latent=latent),
        mlp=MlpSpec(
            ffn_size=1536,
            gated=True,
            activation="silu",
            experts=ExpertsSpec(num_experts=160, top_k=6, shared_ffn_size=3072),
        ),
    )
    run = make_run(model=of_blocks([(4, block)]), ep=8, zero_stage=1)
    parts = saved_bytes(run, block)
    assert parts.norms_bytes == 8 * 5120
    assert parts.attention_bytes == (2 * 192 + 2 * (192 + 128) + 2 * 128) * 128 + 4 * 128 + 4 * (1536 + 512)
    assert parts.mlp_bytes == 6 * (4 * 5120 + 6 * 1536) + 6 * 3072
    own = local_parameters(block, 1, 8)
    assert own.routed == 160 / 8 * 3 * 5120 * 1536
    assert own == local_parameters(block, 1, 1)._replace(routed=own.routed)


@pytest.mark.parametrize(
    ("framework", "zero", "per_parameter"),
    [
        ("megatron", 0, 18),
        ("megatron", 1, 6 + 12 / 8),
        ("megatron-deepspeed", 1, 4 + 16 / 8),
        ("deepspeed", 0, 16),
        ("deepspeed", 1, 4 + 12 / 8),
        ("deepspeed", 2, 2 + 14 / 8),
        ("deepspeed", 3, 16 / 8),
        ("fsdp", 2, 2 + 16 / 8),
        ("fsdp", 3, 16 / 8),
        ("torchtitan", 3, 16 / 8),
        ("internevo", 1, 4 + 12 / 8),
    ],
)
def test_states_per_parameter(framework: str, zero: int, per_parameter: float):
    """ZeRO (arXiv 1910.02054, section 3.1): 2 + 2 + 12; optimizer states, gradients, parameters sharded in turn."""
    run = make_run(framework=framework, zero_stage=zero)
    (stage,) = stages_of(run.model, 1)
    count = 8 * (12 * HIDDEN**2 + 4 * HIDDEN) + 2 * VOCAB * HIDDEN + 2 * HIDDEN
    assert stage_parameters(run.model, stage, 1, 1).total == count
    held = held_totals(run, stage)
    assert held.total_bytes - held.bucket_bytes == pytest.approx(per_parameter * count)


def test_fewer_shards_and_other_bytes():
    (stage,) = stages_of(gpt(), 1)
    whole = held_totals(make_run(zero_stage=1), stage).optimizer_bytes
    assert held_totals(make_run(zero_stage=1, shard_ranks=4), stage).optimizer_bytes == 2 * whole
    pure = HeldBytes(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=4, reduce_bytes=2)
    held = held_totals(make_run(framework="fsdp", devices="1xa100-sxm-80g", held=pure), stage)
    assert held.total_bytes == 8 * stage_parameters(gpt(), stage, 1, 1).total
    assert held.copy_bytes == 0, "parameters are held in the dtype that computes"


def test_a_tied_weight_is_held_on_both_ends():
    tied = gpt(tied=True)
    table = VOCAB * HIDDEN
    alone = stage_parameters(tied, stages_of(tied, 1)[0], 1, 1).total
    first, last = (stage_parameters(tied, stage, 1, 1).total for stage in stages_of(tied, 2))
    assert first + last == pytest.approx(alone + table + 2 * HIDDEN)  # and the last norm


def test_micro_batches_in_flight():
    """1F1B: p - i (arXiv 2006.09503); interleaved: 2 (p - i - 1) + (v - 1) p + 1 chunks (arXiv 2104.04473)."""
    run = make_run(pp=4)
    assert [micro_batches_in_flight(run, stage) for stage in range(4)] == [4, 3, 2, 1]
    few = run.model_copy(update={"global_batch_size": 4})
    assert [micro_batches_in_flight(few, stage) for stage in range(4)] == [2, 2, 2, 1]
    gpipe = run.model_copy(update={"schedule": "gpipe"})
    assert [micro_batches_in_flight(gpipe, stage) for stage in range(4)] == [32] * 4
    interleaved = run.model_copy(update={"virtual_stages": 2})
    assert [micro_batches_in_flight(interleaved, stage) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]


def test_a_stage_by_hand():
    """The last of two stages of Megatron-LM: states, one micro-batch of four blocks, and the loss."""
    run = make_run(pp=2, zero_stage=1, software=FLASH, micro_batch_size=2)
    tokens = 2 * SEQ
    last = run_memory(run).stages[-1]
    parameters = 4 * (12 * HIDDEN**2 + 4 * HIDDEN) + VOCAB * HIDDEN + 2 * HIDDEN
    assert last.held.total_bytes == pytest.approx(parameters * (6 + 12 / 4))
    assert last.activation_bytes == 4 * tokens * (32 * HIDDEN + LOG_SUM_EXPS)
    peak = last.peak
    assert (peak.phase, peak.moment) == ("backward", "loss")
    assert peak.logit_bytes == 6 * tokens * VOCAB
    assert peak.weight_gradient_bytes == 2 * (12 * HIDDEN**2 + 4 * HIDDEN)  # Transformer Engine's stand-ins
    assert peak.communication_bytes == 2 * tokens * 2 * HIDDEN
    expected = (
        last.held.total_bytes + last.activation_bytes + tokens * 4 * HIDDEN + peak.logit_bytes
        + peak.weight_gradient_bytes + peak.communication_bytes + shipped_memory().workspace_bytes
    )  # fmt: skip
    assert last.total_bytes == pytest.approx(expected)


def test_the_fullest_stage_and_phase_are_named():
    first = run_memory(make_run(pp=4, software=FLASH, micro_batch_size=4, model=gpt(num_blocks=32)))
    assert first.peak_stage == 0, "most micro-batches wait there"
    assert first.peak.phase == "backward"
    assert first.peak_bytes == max(stage.total_bytes for stage in first.stages)
    assert [one.phase for one in first.stages[0].phases] == ["initial", "forward", "backward", "step"]
    full = run_memory(make_run(pp=4, software=FLASH, micro_batch_size=4, recompute="full"))
    assert full.peak_stage == 3, "logits"


def test_gradients_that_are_made_anew_are_not_there_at_the_loss():
    """Adam in pure 16 bit on one device: 6 bytes a parameter at the loss, 8 when the optimizer steps."""
    pure = HeldBytes(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=4, reduce_bytes=2)
    run = make_run(framework="fsdp", devices="1xa100-sxm-80g", held=pure, global_batch_size=1)
    count = stage_parameters(run.model, stages_of(run.model, 1)[0], 1, 1).total

    def gradients(run: RunSpec, kind: Any = "allocated") -> dict[str, float]:
        (stage,) = run_memory(run, kind).stages
        return {one.phase: one.gradient_bytes for one in stage.phases}

    assert gradients(run)["forward"] == 0
    assert gradients(run)["step"] == 2 * count
    accumulates = run.model_copy(update={"global_batch_size": 2})
    assert set(gradients(accumulates).values()) == {2 * count}
    assert set(gradients(run, "reserved").values()) == {2 * count}


def test_zero_3_gathers_two_blocks_and_makes_one_whole_gradient():
    run = make_run(framework="fsdp", zero_stage=3, software=Software(loss="fused"))
    block = 12 * HIDDEN**2 + 4 * HIDDEN
    (stage,) = run_memory(run).stages
    moments = {one.phase: one for one in stage.phases}
    assert moments["forward"].gather_bytes == 2 * 2 * block
    assert moments["initial"].gather_bytes == moments["step"].gather_bytes == 0
    alone = run_memory(run.model_copy(update={"zero_stage": 2})).stages[0]
    assert all(one.gather_bytes == 0 for one in alone.phases)


def test_kinds_add_slack_and_the_device():
    constants = shipped_memory().model_copy(
        update={"reserved_factor": 1.1, "context_bytes": 1000, "communicator_bytes": 100}
    )
    run = make_run(tp=2, pp=2, zero_stage=1)
    assert communicators(run) == 4  # tensor, pipeline and data parallel, and all ranks
    allocated, reserved, device = (run_memory(run, kind, constants) for kind in ("allocated", "reserved", "device"))
    assert reserved.peak_bytes == pytest.approx(1.1 * allocated.peak_bytes)
    assert device.peak_bytes == pytest.approx(reserved.peak_bytes + 1000 + 4 * 100)
    assert communicators(make_run(devices="1xa100-sxm-80g")) == 0


def test_temporaries_of_the_step_find_no_place_among_small_blocks():
    """DeepSpeed flattens 16-bit gradients, of all and of the own shard, and takes the norm of the largest in fp64."""
    run = make_run(framework="megatron-deepspeed", zero_stage=1, software=UNFUSED, recompute="full")
    (stage,) = run_memory(run, "reserved").stages
    parameters = stage_parameters(run.model, stages_of(run.model, 1)[0], 1, 1).total
    step = stage.phases[-1]
    norm = 8 * min(VOCAB * HIDDEN, parameters / 8)
    assert step.optimizer_bytes == pytest.approx(2 * parameters + 2 * parameters / 8 + norm)
    slack = (shipped_memory().reserved_factor - 1) * (stage.peak.total_bytes - stage.peak.slack_bytes)
    assert stage.peak.slack_bytes == pytest.approx(slack + step.optimizer_bytes)


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 2, 3]),
    framework=st.sampled_from(["megatron", "megatron-deepspeed", "deepspeed", "fsdp", "torchtitan", "internevo"]),
    recompute=st.sampled_from(["none", "attention", "operators", "full"]),
    attention=st.sampled_from(["flash2", "unfused"]),
    kind=st.sampled_from(["allocated", "reserved", "device"]),
)
def test_more_work_never_takes_less(
    tp: int, pp: int, zero: int, framework: str, recompute: str, attention: str, kind: Any
):
    software = Software(attention=attention)  # type: ignore[arg-type]
    run = make_run(
        tp=tp, pp=pp, zero_stage=zero, framework=framework, recompute=recompute, software=software, dropout=True
    )
    found = run_memory(run, kind)
    assert _is_itemised(found)

    def peak(**changes: Any) -> float:
        return run_memory(run.model_copy(update=changes), kind).peak_bytes

    assert peak(micro_batch_size=2) >= found.peak_bytes
    assert peak(seq_len=2 * SEQ) >= found.peak_bytes
    assert peak(model=gpt(num_blocks=16)) >= found.peak_bytes
    assert peak(schedule="gpipe") >= found.peak_bytes
    assert peak(recompute="none") >= found.peak_bytes - 1
    if zero:
        assert peak(shard_ranks=1) >= found.peak_bytes
    if tp > 1:
        assert peak(sequence_parallel=True) <= found.peak_bytes


def _is_itemised(found: RunBytes) -> bool:
    return all(_adds_up(stage) for stage in found.stages)


def _adds_up(stage: StageBytes) -> bool:
    """Return whether no term is negative and every phase holds at least the states but gradients."""
    least = stage.held.total_bytes - stage.held.gradient_bytes
    names = [name for name in stage.peak._fields if name.endswith("_bytes")]
    values = [getattr(one, name) for one in stage.phases for name in names]
    return min(values) >= 0 and all(one.total_bytes >= least for one in stage.phases)
