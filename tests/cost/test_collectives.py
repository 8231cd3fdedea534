"""Which collectives each kind of layer issues under tensor parallelism, with message bytes by hand, in 16 bit."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.cost.collectives import tensor_parallel_collectives
from meshwright.spec.job import JobSpec
from meshwright.spec.library import model
from meshwright.spec.model import AnyLayer, BlockLayer, ClassifierLayer, MergeLayer, PatchEmbeddingLayer
from meshwright.spec.strategy import Strategy

SAMPLES = 3
JOB = JobSpec(global_batch_size=SAMPLES, seq_len=16, target_seq_len=10)
BERT, T5, SWIN, VIT = (model(f"tiny-{family}") for family in ("bert", "t5", "swin", "vit"))
SOURCE, TARGET = (SAMPLES * tokens * T5.embedding.hidden_size * 2 for tokens in (16, 10))
TABLE = 32 * 4 * 2  # buckets and heads; the same for every sample


def issued(layer: AnyLayer, *, recompute: bool = False, tp: int = 2) -> Counter[tuple[str, int]]:
    """Return how many all-reduces of (phase, bytes) there are."""
    strategy = Strategy(tp=tp, recompute="full" if recompute else "none")
    found: Counter[tuple[str, int]] = Counter()
    for one in tensor_parallel_collectives(layer, strategy, SAMPLES, JOB):
        assert (one.op, one.axis, one.purpose) == ("all_reduce", "tp", "tp")
        found[one.phase, one.message_bytes] += one.count
    return found


def encoder(index: int) -> BlockLayer:
    layer = T5.layers[1 + index]
    assert isinstance(layer, BlockLayer)
    return layer


def test_both_stacks_tokens_are_embedded_at_once():
    assert issued(T5.embedding) == {("forward", SOURCE + TARGET): 1}
    assert issued(T5.head, recompute=False)["backward", TARGET] == 1


def test_cross_attention_is_a_third_part_with_the_sources_gradient():
    for block in T5.layers[3:5]:
        once = {
            ("forward", TARGET): 3,
            ("backward", TARGET): 3,
            ("backward", SOURCE): 1,
            ("backward", TABLE): 1,
        }
        assert issued(block) == once
        assert issued(block, recompute=True) == once | {("recompute", TARGET): 2}


def test_a_shared_tables_gradient_is_summed_in_every_block():
    for index in (0, 1):
        assert issued(encoder(index)) == {("forward", SOURCE): 2, ("backward", SOURCE): 2, ("backward", TABLE): 1}


def test_recomputation_stops_before_the_last_sum_unless_a_norm_keeps_it():
    """A norm saves its input: where one ends the block, the sum before it is part of that."""
    first, last = encoder(0), encoder(1)
    assert (first.closing_norm, last.closing_norm) == (False, True)
    assert issued(first, recompute=True)["recompute", SOURCE] == 1
    assert issued(last, recompute=True)["recompute", SOURCE] == 2
    block = BERT.layers[1]
    assert isinstance(block, BlockLayer)
    assert block.post_norm
    hidden_bytes = SAMPLES * 16 * block.hidden_size * 2
    assert issued(block, recompute=True)["recompute", hidden_bytes] == 2
    assert issued(BERT.embedding) == {("forward", hidden_bytes): 1}
    assert issued(BERT.embedding, recompute=True) == {("forward", hidden_bytes): 1, ("recompute", hidden_bytes): 1}
    assert issued(T5.embedding, recompute=True) == issued(T5.embedding)
    pre_norm = block.model_copy(update={"post_norm": False})
    assert issued(pre_norm, recompute=True)["recompute", hidden_bytes] == 1


def test_windows_change_nothing():
    block = SWIN.layers[1]
    assert isinstance(block, BlockLayer)
    hidden_bytes = SAMPLES * 14**2 * block.hidden_size * 2
    assert issued(block) == {("forward", hidden_bytes): 2, ("backward", hidden_bytes): 2}


@pytest.mark.parametrize("layer", [VIT.embedding, SWIN.embedding, SWIN.layers[3], VIT.head, SWIN.head])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_every_rank_holds_whole_says_nothing(layer: AnyLayer, recompute: bool):
    assert isinstance(layer, PatchEmbeddingLayer | MergeLayer | ClassifierLayer)
    assert not issued(layer, recompute=recompute, tp=4)


@pytest.mark.parametrize("spec", [BERT, T5, SWIN, VIT], ids=lambda spec: spec.family)
def test_alone_there_is_nobody_to_talk_to(spec):
    assert not any(issued(layer, recompute=True, tp=1) for layer in spec.layers)
