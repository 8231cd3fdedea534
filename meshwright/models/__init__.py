"""Compact torch code of the model zoo: a model is a list of layers, built from a `ModelSpec`."""

from meshwright.models.build import Transformer, build_layer, build_model

__all__ = ["Transformer", "build_layer", "build_model"]
