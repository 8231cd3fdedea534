"""Bytes that autograd keeps of each kind of layer, against sums written out by hand, in 16 bit with fused kernels.

Hidden states are 32 wide, with 4 heads of 8, and feed-forward parts 64; 8 tokens of a source, 6 of targets.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cost.activations import saved_bytes, shared_bytes, working_bytes
from meshwright.cost.layer import layer_cost
from meshwright.cost.memory import activation_bytes
from meshwright.cost.predict import predict, stage_layer_costs
from meshwright.spec.job import JobSpec
from meshwright.spec.library import cluster, model
from meshwright.spec.model import (
    AnyLayer,
    BlockLayer,
    ClassifierLayer,
    EmbeddingLayer,
    HeadLayer,
    MergeLayer,
    PatchEmbeddingLayer,
)
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.parts import AttentionSpec, ExpertsSpec, MlpSpec, RelativeSpec, WindowsSpec
from meshwright.spec.plan import Plan
from meshwright.spec.strategy import Strategy
from tests.plans import by_hand

JOB = JobSpec(global_batch_size=4, seq_len=8, target_seq_len=6)
PLAIN = AttentionSpec(num_heads=4, num_kv_heads=4, head_size=8, causal=False)
GELU = MlpSpec(ffn_size=64, gated=False, activation="gelu")
RELU = MlpSpec(ffn_size=64, gated=False, activation="relu")
GATED = MlpSpec(ffn_size=64, gated=True, activation="gelu_tanh")
EXPERTS = MlpSpec(
    ffn_size=64,
    gated=True,
    activation="silu",
    experts=ExpertsSpec(num_experts=4, top_k=2),
)


def attention(**fields: Any) -> AttentionSpec:
    return PLAIN.model_copy(update=fields)


def block(spec: AttentionSpec, mlp: MlpSpec, **fields: Any) -> BlockLayer:
    return BlockLayer.model_validate(
        {"hidden_size": 32, "norm": "rmsnorm", "norm_eps": 1e-6, "attention": spec, "mlp": mlp} | fields
    )


BIASED = attention(relative=RelativeSpec(num_buckets=32, max_distance=128, owns_table=True))
KINDS: dict[str, AnyLayer] = {
    "embedding": EmbeddingLayer(
        hidden_size=32, vocab_size=100, padded_vocab_size=128, max_positions=8, token_types=2, norm="layernorm"
    ),
    "embedding of two": EmbeddingLayer(hidden_size=32, vocab_size=100, padded_vocab_size=128, targets=True),
    "patches": PatchEmbeddingLayer(hidden_size=32, image_size=8, patch_size=4, num_channels=3, norm="layernorm"),
    "post-norm": block(PLAIN, GELU, norm="layernorm", post_norm=True),
    "encoder's last": block(BIASED, RELU, closing_norm=True),
    "decoder": block(
        BIASED.model_copy(update={"causal": True}), GATED, cross_attention=PLAIN, length="target_seq"
    ),
    "windows": block(attention(windows=WindowsSpec(size=2, grid=4)), GELU, norm="layernorm", length=16),
    "experts": block(attention(causal=True, num_kv_heads=2), EXPERTS),
    "merge": MergeLayer(hidden_size=32, grid=4),
    "masked head": HeadLayer(
        hidden_size=32, vocab_size=100, padded_vocab_size=128, norm="layernorm", norm_eps=1e-5, transform="gelu",
        bias=True,
    ),
    "targets' head": HeadLayer(
        hidden_size=32, vocab_size=100, padded_vocab_size=128, norm="rmsnorm", norm_eps=1e-5, length="target_seq"
    ),
    "mean": ClassifierLayer(hidden_size=32, num_classes=10, pooling="mean", norm="layernorm"),
    "pooler": ClassifierLayer(hidden_size=32, num_classes=10, pooling="first", pooler=True),
}  # fmt: skip
LAYER_NORM, RMS_NORM, HIDDEN = 2 * 32 + 8, 2 * 32 + 4, 2 * 32  # bytes a token
HEADS = 2 * 32  # q, k, v or output of one token, over all heads
FFN = 2 * 64


def block_by_hand(kind: str, tp: int) -> int:
    """Return the bytes of one sample in a block on one of `tp` ranks."""
    heads, ffn, num_heads = HEADS // tp, FFN // tp, 4 // tp
    match kind:
        case "post-norm":
            return 8 * (2 * (LAYER_NORM + HIDDEN) + 4 * heads + 4 * num_heads + 2 * ffn)
        case "encoder's last":
            return 8 * (2 * (RMS_NORM + HIDDEN) + RMS_NORM + 4 * heads + 2 * num_heads * 8 + ffn)
        case "decoder":
            to_itself, from_source = 4 * heads + 2 * num_heads * 6, 8 * 2 * heads
            of_targets = 3 * (RMS_NORM + HIDDEN) + to_itself + 2 * heads + 4 * num_heads + 4 * ffn
            return 6 * of_targets + from_source + 8 * HIDDEN
        case "windows":
            return 16 * (2 * (LAYER_NORM + HIDDEN) + 4 * heads + 2 * num_heads * 4 + 2 * ffn)
        case _:  # experts
            router = (4 + 1) * 4 + 2 * (8 + 8 + 4 + 2)
            return 8 * (2 * (RMS_NORM + HIDDEN) + 3 * heads + 4 * num_heads + 2 * (2 * HIDDEN + 4 * ffn) + router)


def saved_by_hand(kind: str, tp: int) -> int:
    """Return the bytes of one sample on one of `tp` ranks."""
    ids, logits = 8 if tp == 1 else 9, 2 * 128 // tp
    match kind:
        case "embedding":
            return 8 * (ids + 8 + LAYER_NORM)
        case "embedding of two":
            return (8 + 6) * ids
        case "patches":
            return 4 * (2 * 48 + LAYER_NORM)
        case "merge":
            return 4 * (4 * HIDDEN + 8 + 4 * HIDDEN)
        case "masked head":
            return 8 * (2 * HIDDEN + LAYER_NORM + HIDDEN + logits + 4 + 8)
        case "targets' head":
            return 6 * (RMS_NORM + HIDDEN + logits + 4 + 8)
        case "mean":
            return 8 * LAYER_NORM + HIDDEN + 2 * 10 + 4 + 8
        case "pooler":
            return 2 * HIDDEN + 2 * 10 + 4 + 8
        case _:
            return block_by_hand(kind, tp)


INPUTS = {
    "embedding": 8 * 16,
    "embedding of two": 14 * 8,
    "patches": 4 * 2 * 48,
    "post-norm": 8 * HIDDEN,
    "encoder's last": 8 * HIDDEN,
    "decoder": 6 * HIDDEN + 8 * HIDDEN,
    "windows": 16 * HIDDEN,
    "experts": 8 * HIDDEN,
    "merge": 16 * HIDDEN,
    "masked head": 8 * (HIDDEN + 8),
    "targets' head": 6 * (HIDDEN + 8),
    "mean": 8 * HIDDEN + 8,
    "pooler": 8 * HIDDEN + 8,
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_bytes_by_hand(kind: str, tp: int):
    assert saved_bytes(KINDS[kind], tp, JOB, "cuda_fused") == saved_by_hand(kind, tp)
    for samples in (1, 3):
        kept = activation_bytes(KINDS[kind], Strategy(tp=tp), samples, JOB, "cuda_fused")
        assert kept == samples * saved_by_hand(kind, tp)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_keeps_the_input_alone(kind: str, tp: int):
    kept = activation_bytes(KINDS[kind], Strategy(tp=tp, recompute="full"), 3, JOB, "cuda_fused")
    assert kept == 3 * INPUTS[kind]


def test_relu_keeps_one_tensor_less():
    gated = MlpSpec(ffn_size=64, gated=True, activation="relu")
    for tp in (1, 2):
        plain, one_less = (saved_bytes(block(PLAIN, mlp), tp, JOB, "cuda_fused") for mlp in (GELU, RELU))
        assert plain - one_less == 8 * FFN // tp
        plain, one_less = (saved_bytes(block(PLAIN, mlp), tp, JOB, "cuda_fused") for mlp in (GATED, gated))
        assert plain - one_less == 8 * FFN // tp


def test_experts_work_on_every_visit():
    dense, routed = block(PLAIN, GATED), block(PLAIN, EXPERTS)
    for tp in (1, 2):
        # Three tensors of each visit's inner width instead of each token's, and the visits' inputs and outputs.
        more = 3 * FFN // tp + 2 * 2 * HIDDEN
        assert working_bytes(routed, tp, JOB) - working_bytes(dense, tp, JOB) == 8 * more


def test_lengths_matter_where_they_must():
    """A token more of the source, or of the targets: what each kind keeps more."""
    longer = JOB.model_copy(update={"seq_len": 9})
    more_targets = JOB.model_copy(update={"target_seq_len": 7})

    def more(kind: str, job: JobSpec, tp: int) -> int:
        return saved_bytes(KINDS[kind], tp, job, "cuda_fused") - saved_by_hand(kind, tp)

    for tp in (1, 2):
        ids = 8 if tp == 1 else 9
        # Keys, values and the source's states; no query sees a longer tensor, whose scores stay inside the kernel.
        assert more("decoder", longer, tp) == 2 * HEADS // tp + HIDDEN
        assert more("targets' head", longer, tp) == 0
        assert more("embedding of two", longer, tp) == more("embedding of two", more_targets, tp) == ids
        for kind in ("encoder's last", "post-norm", "experts", "masked head", "embedding"):
            assert more(kind, longer, tp) > 0
            assert more(kind, more_targets, tp) == 0
        for kind in ("windows", "merge", "patches"):
            assert more(kind, longer, tp) == more(kind, more_targets, tp) == 0
        # Probabilities are a square.
        per_query = 3 * (RMS_NORM + HIDDEN) + 6 * HEADS // tp + 4 * 4 // tp + 4 * FFN // tp
        assert more("decoder", more_targets, tp) == per_query + 2 * 4 // tp * (7**2 - 6**2)


def test_prices_follow_the_lengths():
    """A longer source makes encoders dearer, and of decoders what attends to it; longer targets decoders alone."""
    ranks = cluster("8xa100-sxm-40g")

    def seconds(kind: str, seq_len: int, target_seq_len: int) -> tuple[float, float]:
        job = JobSpec(global_batch_size=4, seq_len=seq_len, target_seq_len=target_seq_len)
        cost = layer_cost(KINDS[kind], layer_parameters(KINDS[kind]), Strategy(tp=2), 4, job, ranks).micro_batch
        return cost.forward.total_s, cost.backward.total_s

    def grow(kind: str, seq_len: int, target_seq_len: int) -> list[bool]:
        pairs = zip(seconds(kind, 4096, 4096), seconds(kind, seq_len, target_seq_len), strict=True)
        return [before < after for before, after in pairs]

    for kind in ("encoder's last", "post-norm", "masked head"):
        assert grow(kind, 8192, 4096) == [True, True]
        assert seconds(kind, 4096, 8192) == seconds(kind, 4096, 4096)
    assert grow("decoder", 8192, 4096) == grow("decoder", 4096, 8192) == [True, True]
    source_s, targets_s = (sum(seconds("decoder", *lengths)) for lengths in ((8192, 4096), (4096, 8192)))
    assert source_s < targets_s
    assert grow("targets' head", 4096, 8192) == [True, True]
    assert seconds("targets' head", 8192, 4096) == seconds("targets' head", 4096, 4096)


def tiny_t5(decoder_strategies: list[Strategy], recompute: str = "none") -> Plan:
    """Return tiny-t5, its weights not tied, on one stage of two ranks, with these strategies of both decoder blocks."""
    spec = model("tiny-t5").model_copy(update={"tied_embedding": False})
    rest = Strategy(dp_replicate=2)
    chosen = [s.model_copy(update={"recompute": recompute}) for s in decoder_strategies]
    return by_hand(
        spec, "2xcpu", [rest, rest, rest, *chosen, rest], batch=8, seq_len=32, target_seq_len=24, micro_batches=4
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_of_one_layout_share_the_sources_states(recompute: str):
    """A prediction counts them once for a run of decoder blocks, the search in each."""
    both, tp = Strategy(dp_replicate=2), Strategy(tp=2)
    sharded = Strategy(dp_shard=2, zero_stage=3)
    for strategies, is_shared in (([both, both], True), ([both, sharded], True), ([tp, tp], True), ([both, tp], False)):
        plan = tiny_t5(strategies, recompute)
        source = plan.model.layers[3]
        samples = 2 // strategies[-1].dp
        once = samples * shared_bytes(source, plan.job)
        assert once == samples * 32 * 64 * 2
        (stage,), costs = predict(plan).stages, stage_layer_costs(plan, 0)
        assert sum(cost.activation_bytes for cost in costs) - stage.activation_bytes == (once if is_shared else 0)
        counted = stage.states.total_bytes + sum(cost.activation_bytes for cost in costs)
        assert stage.peak_bytes <= stage.bound_bytes <= counted + max(cost.transient.total_bytes for cost in costs)
        # The head, which is last, has the most alive.
        assert stage.bound_bytes - stage.peak_bytes == (once if is_shared else 0)
