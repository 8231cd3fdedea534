"""A profile set of Hetu-Galvatron as our own Profile: what can be said in it, and what had to be assumed.

Taken: forward seconds of decoder layers on one GPU, and what a sample leaves there; all-reduce and all-to-all
times; sends between stages; the overlap slowdown. Its conventions are kept and named: backward takes
twice the forward pass (it is not measured), and a bandwidth alone holds for messages of every size.

Not taken: layers split over tensor-parallel ranks. Their compute was never measured (samples are
divided by the degree instead), so the planner scales what one GPU needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from meshwright.errors import UserError
from meshwright.files import make_spec, shorten
from meshwright.imports.galvatron import GalvatronProfile, Hardware
from meshwright.imports.galvatron_files import ForwardTime, LayerMemory
from meshwright.spec.base import Dtype
from meshwright.spec.families import model_from_config
from meshwright.spec.model import BlockLayer, HeadLayer, ModelSpec
from meshwright.spec.profile import CollectiveOp, CollectiveSample, LayerSample, OverlapSample, Profile, Sample
from meshwright.units import MiB

_Made = TypeVar("_Made", bound=Sample)
BACKWARD_OVER_FORWARD = 2
# The sizes that stand for "any": the message that a bandwidth was measured with, and a small one.
_ANY_BYTES = (MiB, 32 * MiB)
_OVERLAP_BYTES = 64 * MiB
_OPS: dict[str, CollectiveOp] = {"allreduce": "all_reduce", "all2all": "all_to_all"}
_LLAMA_FFN = (8, 3)  # of a layer without ffn_dim: 2/3 of 4 times its width
_CONTEXT = 2048  # of rotary positions where the numbers name none: not a limit of the mathematics
# Numbers of a Llama as Meta's own files call them, and as config.json does.
_LLAMA = {
    "dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The profile, the model of its layers, and in words what was taken, left out and assumed."""

    profile: Profile
    model: ModelSpec | None
    taken: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    assumed: tuple[str, ...]


def to_profile(found: GalvatronProfile, model: ModelSpec | None = None) -> Converted:
    """Return `found` as a Profile; `model` says what its layers are, where its own numbers do not.

    Raises UserError when nothing can be said, or when only the model is wanting.
    """
    why_not = _why_no_layers(found)
    model = None if why_not is not None else model or _model_of(found)
    layers = () if model is None else _layer_samples(found, model)
    hardware = found.hardware
    collectives = () if hardware is None else _collectives(hardware)
    overlaps = () if hardware is None else _overlaps(hardware)
    left_out = _left_out(layers, why_not)
    if not layers and not collectives:
        raise UserError(f"{found.name}: nothing of it can be said in a profile: {'; '.join(left_out)}")
    nodes, gpus = (1, 1) if hardware is None else (hardware.num_nodes, hardware.gpus_per_node)
    profile = make_spec(
        Profile,
        device=f"not named by Galvatron's profile of {found.name}",
        backend="cuda",
        num_ranks=nodes * gpus,
        ranks_per_node=gpus,
        torch_version="not named",
        layers=layers,
        collectives=collectives,
        overlaps=overlaps,
    )
    taken = () if model is None else _taken_of_layers(layers, model)
    assumed = () if model is None else _assumed_of_layers(found, layers)
    if hardware is not None:
        taken, assumed = (*taken, *_taken_of_hardware(hardware)), (*assumed, *_assumed_of_hardware(hardware))
    return Converted(profile=profile, model=model, taken=taken, left_out=left_out, assumed=assumed)


# In words.


def _taken_of_layers(layers: tuple[LayerSample, ...], model: ModelSpec) -> tuple[tuple[str, str], ...]:
    blocks = sum(isinstance(sample.layer, BlockLayer) for sample in layers)
    return (("layers", f"{blocks} of a block, {len(layers) - blocks} of the head, of {model.name}"),)


def _taken_of_hardware(hardware: Hardware) -> Iterator[tuple[str, str]]:
    if hardware.collective_s:
        yield "collectives", f"{len(hardware.collective_s)} times of all-reduce and all-to-all"
    if hardware.all_reduce_bytes_per_s:
        yield "collectives", f"{len(hardware.all_reduce_bytes_per_s)} all-reduce bandwidths"
    if hardware.p2p_bytes_per_s:
        yield "sends", f"bandwidths for {len(hardware.p2p_bytes_per_s)} numbers of stages"
    if hardware.overlap_slowdown is not None:
        yield "overlap", f"slowdown {hardware.overlap_slowdown:.3f}"


def _left_out(layers: tuple[LayerSample, ...], why_not: str | None) -> tuple[str, ...]:
    found: list[str] = []
    if why_not is not None:
        found.append(f"layers: {why_not}")
    else:
        if not any(sample.saved_bytes for sample in layers):
            found.append("activations: no table for one GPU at these lengths")
        found.append("layers split by tensor parallelism: their compute was not measured, only divided")
    found.append("all-gather, reduce-scatter: not measured by Galvatron; the link that the others show prices them")
    return tuple(found)


def _assumed_of_layers(found: GalvatronProfile, layers: tuple[LayerSample, ...]) -> tuple[str, ...]:
    lines = [f"backward = {BACKWARD_OVER_FORWARD} x forward: Galvatron measures forward passes only"]
    if found.precision is None:
        lines.append("bf16: the files do not name a dtype")
    if any(time.batch is None for time in _most_telling(found.times)):
        lines.append("batch 1: the keys do not name one")
    lengths = {sample.seq_len for sample in layers}
    if any(len({t.activation_bytes[1] for t in _tables_of(found, length)}) > 1 for length in lengths):
        lines.append("activations: of two tables that differ, the one without sequence parallelism")
    if any(isinstance(sample.layer, HeadLayer) for sample in layers):
        lines.append("all that is not in blocks is the head's: the embedding is not measured apart")
    return tuple(lines)


def _assumed_of_hardware(hardware: Hardware) -> Iterator[str]:
    if hardware.all_reduce_bytes_per_s:
        alike = "no latency, messages of every size alike"
        how = "the times of such groups side by side, scaled" if hardware.collective_s else alike
        yield f"all-reduce bandwidths, of one 32 MiB message: {how}"
    if hardware.p2p_bytes_per_s:
        yield "send bandwidths: no latency, messages of every size alike"
    if hardware.overlap_slowdown is not None:
        yield "overlap: one factor for compute and communication, the larger of the two"


def _why_no_layers(found: GalvatronProfile) -> str | None:
    """Return why there are no layers that a profile can hold; None when there are."""
    kinds = {time.layer_type for time in found.times} - {None}
    if found.name == "hardware" or not kinds:
        return "no layer was measured"
    if kinds != {0}:
        return f"{len(kinds)} types of layers: not a decoder-only model"
    if found.name.endswith(("_attention", "_mlp")):
        return f"{found.name} is half of a layer"
    if found.precision == "fp16":
        return "fp16 is not a dtype of this planner; bf16 and fp32 are"
    if found.artefact is not None:
        return "the models of the 2022 artefact are not decoder-only"
    if found.meta is not None and not _is_decoder(found):
        return "not a decoder-only model, by its numbers"
    return None


def _is_decoder(found: GalvatronProfile) -> bool:
    meta = found.meta or {}
    return meta.get("model_type") in ("llama", "gpt2", "qwen2", "qwen3") or "dim" in meta or "n_embd" in meta


# The model.


def _model_of(found: GalvatronProfile) -> ModelSpec:
    """Return the model that the set's own numbers describe."""
    if found.meta is None:
        raise UserError(
            f"model-spec: {found.name} comes without numbers of the model (meta_configs); "
            "say which it is with --model-spec, a library name or a file"
        )
    return model_from_meta(dict(found.meta), name=found.name, where=found.meta_file)


def model_from_meta(meta: dict[str, object], *, name: str, where: str) -> ModelSpec:
    """Return the decoder-only model in the numbers of a file of `meta_configs`.

    It has the names of config.json with its model_type, those of GPT-2, or those of Meta's Llama files, in
    which the feed-forward size may follow from the width: 2/3 of 4 times it, up to `multiple_of`.
    """
    if "model_type" in meta:
        return model_from_config(meta, name=name, where=where)
    if "n_embd" in meta:
        return model_from_config({**meta, "model_type": "gpt2"}, name=name, where=where)
    if "dim" not in meta:
        raise UserError(f"{where}: neither numbers of a Llama (dim) nor of a GPT (n_embd), and no model_type")
    config: dict[str, object] = {}
    for ours, theirs in _LLAMA.items():
        if ours in meta:  # checked here, so that an error has the name that is in the file
            config[theirs] = meta[ours] if ours == "norm_eps" else _whole(meta, ours, where)
    if "ffn_dim" not in meta:
        width, multiple = (_whole(meta, key, where) for key in ("dim", "multiple_of"))
        size = width * _LLAMA_FFN[0] // _LLAMA_FFN[1]
        config["intermediate_size"] = -(-size // multiple) * multiple
    config.setdefault("max_position_embeddings", _CONTEXT)
    return model_from_config({**config, "model_type": "llama"}, name=name, where=where)


def _whole(meta: dict[str, object], key: str, where: str) -> int:
    value = meta.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 22:
        given = "missing" if value is None else shorten(value)
        raise UserError(f"{where}: {key}: must be a positive whole number, not {given}")
    return value


# Samples.


def _layer_samples(found: GalvatronProfile, model: ModelSpec) -> tuple[LayerSample, ...]:
    """Return a sample of the block and of the head for each batch and length that was measured."""
    block = next(layer for layer in model.layers if isinstance(layer, BlockLayer))
    made: dict[object, LayerSample] = {}
    for time in _most_telling(found.times):
        sample = _layer_sample(block if time.layer_type == 0 else model.language_head, time, found)
        made.setdefault(sample.key, sample)
    return tuple(made.values())


def _most_telling(times: tuple[ForwardTime, ...]) -> Iterator[ForwardTime]:
    """Yield times of layers and of the rest; the oldest style, without a batch, only where there is no other."""
    for kind in (0, None):
        of_kind = [time for time in times if time.layer_type == kind and time.seconds_per_sample > 0]
        keyed = [time for time in of_kind if time.batch is not None]
        yield from keyed or of_kind


def _layer_sample(layer: BlockLayer | HeadLayer, time: ForwardTime, found: GalvatronProfile) -> LayerSample:
    length = time.seq_lens[0] if time.seq_lens else found.seq_len
    if length is None:
        raise UserError(f"{found.name}: no sequence length: neither the keys nor the name of the file have one")
    dtype: Dtype = "fp32" if found.precision == "fp32" else "bf16"
    batch = time.batch or 1
    forward_s = batch * time.seconds_per_sample
    # Of a sample on one GPU; where there are two tables, the one without sequence parallelism, which is not for us.
    tables = sorted(_tables_of(found, length), key=lambda table: table.sequence_parallel)
    saved = tables[0].activation_bytes[1] if tables and isinstance(layer, BlockLayer) else 0.0
    return _sample(
        LayerSample,
        found.name,
        layer=layer,
        tp=1,
        samples_per_rank=batch,
        seq_len=length,
        dtype=dtype,
        busy_ranks=1,
        forward_s=forward_s,
        backward_s=BACKWARD_OVER_FORWARD * forward_s,
        saved_bytes=round(batch * saved),
    )


def _sample(kind: type[_Made], what: str, **fields: object) -> _Made:
    """Return a sample; a figure that cannot be is told with what it is of."""
    try:
        return make_spec(kind, **fields)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def _tables_of(found: GalvatronProfile, length: int) -> list[LayerMemory]:
    """Return the tables of layers at `length` that say what one GPU keeps."""
    return [t for t in found.layers if (t.seq_len or found.seq_len or length) == length and 1 in t.activation_bytes]


def _collectives(hardware: Hardware) -> tuple[CollectiveSample, ...]:
    """Return times as they are, and bandwidths as times."""
    samples: dict[object, CollectiveSample] = {}
    for sample in (*_timed(hardware), *_from_bandwidths(hardware), *_sends(hardware)):
        samples.setdefault(sample.key, sample)
    return tuple(samples.values())


def _timed(hardware: Hardware) -> Iterator[CollectiveSample]:
    for (op, ranks, size), seconds in hardware.collective_s.items():
        if ranks <= hardware.num_gpus:
            yield _collective(hardware, _OPS[op], ranks, 1, size, seconds)


def _from_bandwidths(hardware: Hardware) -> Iterator[CollectiveSample]:
    """Yield times from bus bandwidths: 2 (n-1)/n * bytes / bandwidth.

    Where groups side by side were timed by size, those apart have these times, scaled: a straight
    line through nothing would make small messages between distant ranks cheaper than between near ones.
    """
    for (ranks, consecutive), bytes_per_s in hardware.all_reduce_bytes_per_s.items():
        if not 1 < ranks <= hardware.num_gpus:
            continue
        stride = 1 if consecutive else hardware.num_gpus // ranks
        near = {size: s for (op, n, size), s in hardware.collective_s.items() if (op, n) == ("allreduce", ranks)}
        near_bytes_per_s = hardware.all_reduce_bytes_per_s.get((ranks, True))
        if consecutive and near:
            continue
        if near and near_bytes_per_s is not None:
            sizes = {size: seconds * near_bytes_per_s / bytes_per_s for size, seconds in near.items()}
        else:
            sizes = {size: 2 * (ranks - 1) / ranks * size / bytes_per_s for size in _ANY_BYTES}
        for size, seconds in sizes.items():
            yield _collective(hardware, "all_reduce", ranks, stride, size, seconds)


def _sends(hardware: Hardware) -> Iterator[CollectiveSample]:
    """Yield sends between neighbouring stages; a ring of stages is as fast as its slowest link, so across nodes."""
    for stages, bytes_per_s in hardware.p2p_bytes_per_s.items():
        if 1 < stages <= hardware.num_gpus:
            for size in _ANY_BYTES:
                yield _collective(hardware, "send", 2, hardware.num_gpus // stages, size, size / bytes_per_s)


def _collective(
    hardware: Hardware, op: CollectiveOp, ranks: int, stride: int, size: int, seconds: float
) -> CollectiveSample:
    nodes = len({rank * stride // hardware.gpus_per_node for rank in range(ranks)})
    return _sample(
        CollectiveSample,
        f"hardware: {op} over {ranks} ranks",
        op=op,
        dtype="bf16",
        num_ranks=ranks,
        stride=stride,
        num_nodes=hardware.num_nodes if op == "send" else nodes,
        message_bytes=size,
        seconds=seconds,
    )


def _overlaps(hardware: Hardware) -> tuple[OverlapSample, ...]:
    slowdown = hardware.overlap_slowdown
    if slowdown is None:
        return ()
    return (
        _sample(
            OverlapSample,
            "hardware: overlap",
            op="all_reduce",
            num_ranks=hardware.num_gpus,
            message_bytes=_OVERLAP_BYTES,
            compute_slowdown=slowdown,
            communication_slowdown=slowdown,
        ),
    )
