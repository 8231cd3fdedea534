"""Plans whose training must equal training on one device: every dimension alone, in pairs, and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.base import Dtype
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.spec.job import AdamW, Budget, JobSpec
from meshwright.spec.model import (
    BlockLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerGroup,
    ModelSpec,
)
from meshwright.spec.parts import AttentionSpec, MlpSpec
from meshwright.spec.plan import Plan, StagePlan
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy

SEQ_LEN = 12
Layers = Sequence[tuple[int, Strategy]]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    plan: Plan


def llama(*, num_blocks: int = 4, qk_norm: bool = False, tied: bool = False, num_heads: int = 4) -> ModelSpec:
    """A small Llama: rotary positions, grouped queries (2 heads a key), gated MLP, vocabulary not a round number."""
    hidden = 8 * num_heads
    block = BlockLayer(
        hidden_size=hidden,
        norm="rmsnorm",
        norm_eps=1e-5,
        attention=AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_heads // 2, head_size=8, rotary=True, qk_norm=qk_norm
        ),
        mlp=MlpSpec(ffn_size=12 * num_heads, gated=True, activation="silu"),
    )
    return _model("llama", block, num_blocks, tied=tied, max_positions=0)


def gpt2(*, num_blocks: int = 4, tied: bool = True, num_heads: int = 4) -> ModelSpec:
    """A small GPT-2: learned positions, biases, LayerNorm, tied embedding."""
    hidden = 8 * num_heads
    block = BlockLayer(
        hidden_size=hidden,
        norm="layernorm",
        norm_eps=1e-5,
        attention=AttentionSpec(num_heads=num_heads, num_kv_heads=num_heads, head_size=8, bias=True, output_bias=True),
        mlp=MlpSpec(ffn_size=4 * hidden, gated=False, activation="gelu_tanh", bias=True),
    )
    return _model("gpt2", block, num_blocks, tied=tied, max_positions=16)


def _model(family: str, block: BlockLayer, num_blocks: int, *, tied: bool, max_positions: int) -> ModelSpec:
    vocab, padded = 61, 72  # divisible by 2, 3, 4, 6 and 8; 11 rows of padding
    hidden = block.hidden_size
    return ModelSpec(
        name=f"{family}-test",
        family=family,
        tied_embedding=tied,
        max_seq_len=max_positions,
        groups=(
            LayerGroup(
                num_layers=1,
                layer=EmbeddingLayer(
                    hidden_size=hidden, vocab_size=vocab, padded_vocab_size=padded, max_positions=max_positions
                ),
            ),
            LayerGroup(num_layers=num_blocks, layer=block),
            LayerGroup(
                num_layers=1,
                layer=HeadLayer(
                    hidden_size=hidden,
                    vocab_size=vocab,
                    padded_vocab_size=padded,
                    norm=block.norm,
                    norm_eps=block.norm_eps,
                ),
            ),
        ),
    )


def cluster(num_ranks: int) -> ClusterSpec:
    link = LinkSpec(bytes_per_s=1e9, latency_s=1e-4)
    device = DeviceSpec(
        name="test-cpu",
        backend="cpu",
        memory_bytes=4 << 30,
        memory_bytes_per_s=1e10,
        bf16_flops_per_s=1e10,
        fp32_flops_per_s=1e10,
        launch_s=1e-5,
        kernels="cpu_stock",
        source="round numbers for tests",
    )
    return ClusterSpec(
        name=f"{num_ranks}xcpu",
        num_nodes=1,
        devices_per_node=num_ranks,
        device=device,
        intra_node=link,
        inter_node=link,
    )


def make_plan(
    model: ModelSpec,
    stages: Sequence[Layers],
    *,
    micro_batches: int,
    batch: int,
    schedule: ScheduleName = "1f1b",
    dtype: Dtype = "fp32",
    dropout: float = 0.0,
) -> Plan:
    plans = tuple(StagePlan.of([s for count, s in layers for _ in range(count)]) for layers in stages)
    num_ranks = len(stages) * stages[0][0][1].num_devices
    return Plan(
        model=model,
        cluster=cluster(num_ranks),
        job=JobSpec(
            global_batch_size=batch,
            seq_len=model.usual_seq_len or SEQ_LEN,
            target_seq_len=model.usual_target_seq_len or None,
            param_dtype=dtype,
            dropout=dropout,
            optimizer=AdamW(lr=3e-3, eps=1e-6, clip_norm=0.5),
        ),
        budget=Budget(memory_bytes=4 << 30),
        num_devices=num_ranks,
        global_batch_size=batch,
        num_micro_batches=micro_batches,
        schedule=schedule,
        stages=plans,
    )


def s(
    *,
    tp: int = 1,
    rep: int = 1,
    shard: int = 1,
    zero: int = 0,
    recompute: bool = False,
    inner: str = "tp",
) -> Strategy:
    """A strategy in a few characters."""
    return Strategy(
        tp=tp,
        dp_replicate=rep,
        dp_shard=shard,
        zero_stage=zero,  # type: ignore[arg-type]
        recompute="full" if recompute else "none",
        inner=inner,  # type: ignore[arg-type]
    )


def all_cases() -> list[Case]:
    return [*_one_rank(), *_two_ranks(), *_four_ranks(), *_six_ranks(), *_eight_ranks()]


def _one_rank() -> list[Case]:
    one = s()
    return [
        Case(name="single", plan=make_plan(llama(), [[(6, one)]], micro_batches=2, batch=4)),
        Case(
            name="single-recompute-tied",
            plan=make_plan(gpt2(), [[(1, one), (4, s(recompute=True)), (1, one)]], micro_batches=2, batch=4),
        ),
    ]


def _two_ranks() -> list[Case]:
    llama_, gpt2_ = llama(), gpt2()
    one = s()
    return [
        Case(name="dp2", plan=make_plan(llama_, [[(6, s(rep=2))]], micro_batches=2, batch=8)),
        Case(name="zero2x2", plan=make_plan(llama_, [[(6, s(shard=2, zero=2))]], micro_batches=2, batch=8)),
        Case(name="zero3x2-tied", plan=make_plan(gpt2_, [[(6, s(shard=2, zero=3))]], micro_batches=2, batch=8)),
        Case(name="tp2", plan=make_plan(llama_, [[(6, s(tp=2))]], micro_batches=2, batch=4)),
        Case(name="tp2-tied", plan=make_plan(gpt2_, [[(6, s(tp=2))]], micro_batches=2, batch=4)),
        Case(name="tp2-qk-norm", plan=make_plan(llama(qk_norm=True), [[(6, s(tp=2))]], micro_batches=2, batch=4)),
        Case(
            name="pp2-uneven",
            plan=make_plan(llama_, [[(2, one)], [(4, one)]], micro_batches=4, batch=8),
        ),
        Case(
            name="pp2-gpipe-tied",
            plan=make_plan(gpt2_, [[(4, one)], [(2, one)]], micro_batches=4, batch=8, schedule="gpipe"),
        ),
        Case(
            name="tp2-recompute",
            plan=make_plan(
                llama_,
                [[(1, s(tp=2)), (4, s(tp=2, recompute=True)), (1, s(tp=2, recompute=True))]],
                micro_batches=2,
                batch=4,
            ),
        ),
        Case(
            name="tp2-and-dp2-and-zero3",
            plan=make_plan(
                llama_,
                [[(1, s(shard=2, zero=3)), (1, s(tp=2)), (1, s(rep=2)), (2, s(tp=2, recompute=True)), (1, s(rep=2))]],
                micro_batches=2,
                batch=8,
            ),
        ),
        Case(
            name="tied-ends-alone-zero2-between",
            plan=make_plan(gpt2_, [[(1, s(tp=2)), (4, s(shard=2, zero=2)), (1, s(tp=2))]], micro_batches=2, batch=8),
        ),
        Case(
            name="tied-ends-alone-zero3-between",
            plan=make_plan(gpt2_, [[(1, s(tp=2)), (4, s(shard=2, zero=3)), (1, s(tp=2))]], micro_batches=2, batch=8),
        ),
        Case(
            name="gpipe-tied-recompute-everywhere",
            plan=make_plan(
                gpt2_, [[(6, s(shard=2, zero=3, recompute=True))]], micro_batches=4, batch=8, schedule="gpipe"
            ),
        ),
        Case(
            name="bf16-zero3-and-tp",
            plan=make_plan(llama_, [[(2, s(shard=2, zero=3)), (4, s(tp=2))]], micro_batches=2, batch=8, dtype="bf16"),
        ),
    ]


def _four_ranks() -> list[Case]:
    llama_, gpt2_, untied = llama(), gpt2(), gpt2(tied=False)
    return [
        Case(name="hsdp2x2", plan=make_plan(llama_, [[(6, s(rep=2, shard=2, zero=3))]], micro_batches=2, batch=8)),
        Case(
            name="hsdp2x2-zero2-tied",
            plan=make_plan(gpt2_, [[(6, s(rep=2, shard=2, zero=2))]], micro_batches=2, batch=8),
        ),
        Case(name="zero2x4", plan=make_plan(llama_, [[(6, s(shard=4, zero=2))]], micro_batches=2, batch=8)),
        Case(name="tp2-dp2", plan=make_plan(llama_, [[(6, s(tp=2, rep=2))]], micro_batches=2, batch=8)),
        Case(
            name="tp2-dp2-inner-dp-qk-norm",
            plan=make_plan(
                llama(qk_norm=True), [[(6, s(tp=2, shard=2, zero=3, inner="dp"))]], micro_batches=2, batch=8
            ),
        ),
        Case(name="tp4-gpt2-untied", plan=make_plan(untied, [[(6, s(tp=4))]], micro_batches=2, batch=4)),
        Case(
            name="both-mesh-orders",
            plan=make_plan(
                llama_,
                [
                    [
                        (2, s(tp=2, rep=2)),
                        (1, s(tp=2, shard=2, zero=3, inner="dp")),
                        (1, s(tp=2, shard=2, zero=2)),
                        (2, s(tp=2, rep=2, inner="dp")),
                    ]
                ],
                micro_batches=2,
                batch=8,
            ),
        ),
        Case(
            name="pp2-dp2-tied",
            plan=make_plan(gpt2_, [[(3, s(rep=2))], [(3, s(rep=2))]], micro_batches=4, batch=8),
        ),
        Case(
            name="pp2-zero3-tied-uneven",
            plan=make_plan(gpt2_, [[(4, s(shard=2, zero=3))], [(2, s(shard=2, zero=3))]], micro_batches=4, batch=8),
        ),
        Case(
            name="pp2-mixed-uneven",
            plan=make_plan(
                llama_,
                [
                    [(1, s(shard=2, zero=3)), (1, s(tp=2, recompute=True))],
                    [(1, s(rep=2)), (1, s(tp=2)), (1, s(shard=2, zero=2, recompute=True)), (1, s(tp=2))],
                ],
                micro_batches=4,
                batch=16,
            ),
        ),
        Case(
            name="pp2-tp2-gpipe",
            plan=make_plan(llama_, [[(3, s(tp=2))], [(3, s(tp=2))]], micro_batches=4, batch=8, schedule="gpipe"),
        ),
        Case(
            name="pp4-1f1b",
            plan=make_plan(
                llama_, [[(2, s())], [(1, s(recompute=True))], [(1, s())], [(2, s())]], micro_batches=8, batch=16
            ),
        ),
        Case(
            name="pp2-tied-tp2-bf16",
            plan=make_plan(
                gpt2_, [[(2, s(tp=2))], [(2, s(rep=2)), (2, s(tp=2))]], micro_batches=4, batch=16, dtype="bf16"
            ),
        ),
        Case(
            name="fewer-micro-batches-than-stages",
            plan=make_plan(gpt2_, [[(2, s())], [(1, s())], [(1, s())], [(2, s())]], micro_batches=2, batch=4),
        ),
    ]


def _six_ranks() -> list[Case]:
    six_heads = llama(num_heads=12)
    return [
        Case(
            name="tp2-to-tp3",
            plan=make_plan(
                six_heads,
                [[(2, s(tp=2, shard=3, zero=3)), (2, s(tp=3, rep=2)), (2, s(tp=2, rep=3))]],
                micro_batches=2,
                batch=24,
            ),
        ),
        Case(
            name="tp6-dp6-tp3-inner-dp",
            plan=make_plan(
                six_heads,
                [[(1, s(rep=6)), (2, s(tp=6)), (1, s(tp=3, shard=2, zero=3, inner="dp")), (2, s(shard=6, zero=3))]],
                micro_batches=2,
                batch=12,
            ),
        ),
        Case(
            name="three-stages",
            plan=make_plan(
                llama(),
                [
                    [(1, s(rep=2)), (1, s(tp=2))],
                    [(1, s(shard=2, zero=3))],
                    [(1, s(tp=2, recompute=True)), (2, s(rep=2))],
                ],
                micro_batches=6,
                batch=12,
            ),
        ),
        Case(
            name="three-stages-tied-gpipe",
            plan=make_plan(
                gpt2(),
                [[(1, s(tp=2)), (1, s(rep=2))], [(2, s(tp=2))], [(1, s(shard=2, zero=2)), (1, s(tp=2))]],
                micro_batches=6,
                batch=12,
                schedule="gpipe",
            ),
        ),
    ]


def _eight_ranks() -> list[Case]:
    eight_heads = llama(num_heads=8, num_blocks=6, qk_norm=True)
    return [
        Case(
            name="eight-strategies",
            plan=make_plan(
                eight_heads,
                [
                    [(1, s(shard=4, zero=3)), (1, s(tp=2, rep=2, inner="dp")), (1, s(tp=4, recompute=True))],
                    [
                        (1, s(tp=2, shard=2, zero=3, recompute=True)),
                        (1, s(rep=2, shard=2, zero=2)),
                        (1, s(tp=4)),
                        (1, s(rep=4, recompute=True)),
                        (1, s(tp=2, shard=2, zero=2)),
                    ],
                ],
                micro_batches=4,
                batch=32,
            ),
        ),
        Case(
            name="tp2-hsdp2x2",
            plan=make_plan(eight_heads, [[(8, s(tp=2, rep=2, shard=2, zero=3))]], micro_batches=2, batch=8),
        ),
        Case(
            name="pp4-tied-hsdp-free",
            plan=make_plan(
                gpt2(num_heads=8),
                [[(2, s(tp=2))], [(1, s(rep=2))], [(1, s(shard=2, zero=3))], [(2, s(tp=2))]],
                micro_batches=8,
                batch=16,
            ),
        ),
    ]
