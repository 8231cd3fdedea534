"""meshwright finds the fastest hybrid-parallel way to train a Transformer, and trains with it.

    import meshwright

    found = meshwright.plan("llama-2-7b", "8xa100-sxm-40g", global_batch=64, seq_len=4096)

Planning needs no torch. Training lives in `meshwright.runtime`, which does.
"""

from meshwright.cost.predict import predict
from meshwright.errors import UserError
from meshwright.search.engine import Found, Infeasible
from meshwright.search.planner import load_plan, plan, save_plan
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.spec.job import AdamW, BatchRange, Budget, JobSpec
from meshwright.spec.library import cluster, model
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import LayerRun, Plan, Prediction, Proof, StagePlan
from meshwright.spec.profile import Profile
from meshwright.spec.strategy import Strategy

__all__ = [
    "AdamW",
    "BatchRange",
    "Budget",
    "ClusterSpec",
    "DeviceSpec",
    "Found",
    "Infeasible",
    "JobSpec",
    "LayerRun",
    "LinkSpec",
    "ModelSpec",
    "Plan",
    "Prediction",
    "Profile",
    "Proof",
    "StagePlan",
    "Strategy",
    "UserError",
    "cluster",
    "load_plan",
    "model",
    "plan",
    "predict",
    "save_plan",
]
