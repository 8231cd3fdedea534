"""What a sample of a model is: the lengths that a job may have, and the shapes of inputs and targets."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.files import shorten
from meshwright.spec.flops import num_tokens
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ClassifierLayer, ModelSpec, PatchEmbeddingLayer
from meshwright.spec.tensors import Lengths


def sample_lengths(model: ModelSpec, seq_len: int | None, target_seq_len: int | None) -> Lengths:
    """Return the lengths of a job's samples: what is given, else what is usual for `model`. UserError in one line."""
    if seq_len is None:
        if not model.usual_seq_len:
            raise UserError(f"seq-len: required, since {model.name} has no usual length; give one, such as 2048")
        seq_len = model.usual_seq_len
    if target_seq_len is None and model.has_targets:
        target_seq_len = model.usual_target_seq_len or None
    if reason := why_wrong_lengths(model, seq_len, target_seq_len):
        field, _, rest = reason.partition(":")
        raise UserError(f"{field.replace('_', '-')}:{rest}")
    return Lengths(seq_len, target_seq_len or 0)


def why_wrong_lengths(model: ModelSpec, seq_len: int, target_seq_len: int | None) -> str | None:
    """Return why samples of these lengths cannot be those of `model`, or None: the field first, then the reason."""
    fixed, most = model.fixed_seq_len, model.max_seq_len
    if fixed and seq_len != fixed:
        return f"seq_len: {shorten(seq_len)} is not the {fixed} tokens of an image of {model.name}; leave it out"
    if most and seq_len > most:
        return f"seq_len: {shorten(seq_len)} is above what {model.name} has positions for ({most})"
    if model.has_targets and target_seq_len is None:
        return f"target_seq_len: required, since {model.name} has a decoder beside its encoder; such as {seq_len}"
    if not model.has_targets and target_seq_len is not None:
        return f"target_seq_len: {target_seq_len} is given, but {model.name} has no decoder beside an encoder"
    return None


def input_shapes(model: ModelSpec, job: JobSpec) -> tuple[tuple[int, ...], ...]:
    """Return the shapes, for one sample, of what the first layer takes: ids, two of them, or an image."""
    first = model.embedding
    if isinstance(first, PatchEmbeddingLayer):
        return ((first.num_channels, first.image_size, first.image_size),)
    source = (job.lengths.seq,)
    return (source, (job.lengths.target_seq,)) if first.targets else (source,)


def target_shape(model: ModelSpec, job: JobSpec) -> tuple[int, ...]:
    """Return the shape, for one sample, of the loss's targets: one a token, or one class."""
    return () if isinstance(model.head, ClassifierLayer) else (num_tokens(model.head, job.lengths),)
