"""Training under a plan, on stock PyTorch. `parallelize` is the way in for people with their own loop."""

from meshwright.runtime.optimizer import make_optimizer
from meshwright.runtime.parallelize import Engine, StepReport, parallelize

__all__ = ["Engine", "StepReport", "make_optimizer", "parallelize"]
