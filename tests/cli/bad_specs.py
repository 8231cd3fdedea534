"""Bad models, clusters, jobs, budgets and profiles."""

from __future__ import annotations

import json
from typing import Any

from meshwright.files import canonical_json
from meshwright.spec.profile import CollectiveSample, CopySample, LaunchSample, MatmulSample, Profile
from tests.cli.bad import CLUSTER, MODEL, PLAN, Bad, Content, ask, drop, put, question, spoiled, with_text

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
PROFILE = canonical_json(
    Profile(
        device="test",
        backend="cpu",
        num_ranks=4,
        torch_version="2",
        matmuls=(MatmulSample(dtype="fp32", m=64, k=64, n=64, busy_ranks=4, seconds=1e-3),),
        copies=(CopySample(moved_bytes=1 << 20, busy_ranks=4, seconds=1e-3),),
        launches=(LaunchSample(busy_ranks=4, seconds=1e-6),),
        collectives=(
            CollectiveSample(op="all_reduce", num_ranks=4, stride=1, message_bytes=1 << 20, seconds=1e-2),
            CollectiveSample(op="all_reduce", num_ranks=4, stride=1, message_bytes=1 << 10, seconds=1e-3),
        ),
    )
)
HUGE = 10**30
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)
)
BLOCK = ("groups", 1, "layer")


def of_config(name: str, says: str, **changes: Any) -> Bad:
    """Return a row with a config.json whose fields are changed; `...` leaves one out."""
    fields = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    return of_file(f"config: {name}", "config.json", json.dumps(fields), says, "model")


def of_file(name: str, file: str, content: Content, says: str, option: str) -> Bad:
    return Bad(name=name, command=ask(**{option: file}), says=says, files={file: content})


def of_model(name: str, says: str, content: Content, file: str = "m.json") -> Bad:
    return of_file(f"model: {name}", file, content, says, "model")


def of_yaml(name: str, says: str, content: Content) -> Bad:
    """Return a row with a cluster file that is no YAML, or none that we read."""
    return of_cluster(name, f"c.yaml: not readable as YAML: {says}", content)


def of_cluster(name: str, says: str, content: Content, file: str = "c.yaml") -> Bad:
    return of_file(f"cluster: {name}", file, content, says, "cluster")


def of_profile(name: str, says: str, content: Content) -> Bad:
    return of_file(f"profile: {name}", "p.json", content, says, "profile")


def of_plan_option(says: str, **options: str) -> Bad:
    shown = ", ".join(f"{key} {value[:30]}" for key, value in options.items())
    return Bad(name=f"plan: {shown}", command=ask(**options), says=says)


def of_predict(says: str, **options: str) -> Bad:
    shown = ", ".join(f"{key} {value[:30]}" for key, value in options.items())
    return Bad(name=f"predict: {shown}", command=("predict", *question(**options)), says=says)


MODELS = [
    of_plan_option("model: 'llama-9' is neither a known model nor a file", model="llama-9"),
    of_plan_option("missing/config.json: no such file", model="missing/config.json"),
    of_plan_option("known: bert-base", model=""),
    of_plan_option("is neither a known model nor a file", model="\u043c\u043e\u0434\u0435\u043b\u044c"),
    of_plan_option("a\\nb.json: no such file", model="a\nb.json"),
    of_plan_option("cannot be read: File name too long", model="x/" + "y" * 5000),
    of_plan_option("dev/zero: is a device, not a file", model="/dev/zero"),
    Bad(
        name="model: folder without a config.json",
        command=ask(model="empty"),
        says="empty/config.json: no such file",
        files={"empty/": ""},
    ),
    of_config("zero heads", "num_attention_heads: must be a positive whole number, not 0", num_attention_heads=0),
    of_config("negative size", "hidden_size: must be a positive whole number, not -64", hidden_size=-64),
    of_config("huge size", "hidden_size: must be at most 4194304, not 1000", hidden_size=HUGE),
    of_config("huge depth", "num_hidden_layers: must be at most 4096, not 1000", num_hidden_layers=HUGE),
    of_config("deep", "num_hidden_layers: must be at most 4096, not 5000", num_hidden_layers=5000),
    of_config("text for a number", "hidden_size: must be a positive whole number, not '64'", hidden_size="64"),
    of_config("fraction", "hidden_size: must be a positive whole number, not 64.5", hidden_size=64.5),
    of_config("true for a number", "vocab_size: must be a positive whole number, not True", vocab_size=True),
    of_config("list for a number", "vocab_size: must be a positive whole number, not a list", vocab_size=[256]),
    of_config("null", "hidden_size: required, but missing", hidden_size=None),
    of_config("missing key", "vocab_size: required, but missing", vocab_size=...),
    of_config("no model_type", "supported model types: gpt2, llama, qwen2, qwen3", model_type=...),
    of_config("heads do not divide", "num_attention_heads: 5 does not divide hidden_size (64)",
              num_attention_heads=5, num_key_value_heads=5),
    of_config("kv heads do not divide", "num_key_value_heads: 3 does not divide num_attention_heads (4)",
              num_key_value_heads=3),
    of_config("odd head size", "head_dim: must be even for rotary positions, not 15", head_dim=15),
    of_config("NaN", "rms_norm_eps: must be a positive number, not nan", rms_norm_eps=float("nan")),
    of_config("infinity", "rms_norm_eps: must be at most 1e+18, not inf", rms_norm_eps=float("inf")),
    of_config("above a float", "rope_theta: must be at most 1e+18, not 1000", rope_theta=10**400),
    of_config("unknown architecture", "model_type: 'mamba' is not supported; supported: gpt2", model_type="mamba"),
    of_config("half a surrogate pair", "is not supported; supported: gpt2", model_type="\ud800"),
    of_config("unknown activation", "hidden_act: 'relu6' is not supported; allowed: silu", hidden_act="relu6"),
    of_config("other positions", "rope_type: 'yarn' is not supported; allowed: default, llama3",
              rope_scaling={"rope_type": "yarn", "factor": 2.0}),
    of_config("half a rope", "rope_scaling: low_freq_factor: required, but missing",
              rope_scaling={"rope_type": "llama3", "factor": 8.0}),
    of_config("quantised", "quantization_config: an object is not supported", quantization_config={"bits": 4}),
    of_model("truncated", "m.json: not readable as JSON: ", MODEL[: len(MODEL) // 2]),
    of_model("empty file", "m.json: not readable as JSON: Expecting value", ""),
    of_model("list", "m.json: neither a model file (no groups) nor a config.json (no model_type)", "[1, 2]"),
    of_model("null alone", "m.json: neither a model file (no groups)", "null"),
    of_model("key twice", "m.json: not readable as JSON: key 'model_type' is there twice",
             '{"model_type": "llama", "model_type": "gpt2"}'),
    of_model("UTF-16", "m.json: not a UTF-8 text file", MODEL.encode("utf-16")),
    of_model("nested without end", "m.json: not readable as JSON: ", "[" * 100_000),
    of_model("a number of 5000 digits", "m.json: not readable as JSON: Exceeds the limit",
             '{"groups": ' + "9" * 5000 + "}"),
    of_model("missing key", "hidden_size: required, but missing", spoiled(MODEL, drop(*BLOCK, "hidden_size"))),
    of_model("unknown key", "color: unknown key", spoiled(MODEL, put("color", value="red"))),
    of_model("text for a number", "hidden_size: must be a valid integer, not '64'",
             spoiled(MODEL, put(*BLOCK, "hidden_size", value="64"))),
    of_model("huge", "hidden_size: must be less than or equal to 4194304, not 1000",
             spoiled(MODEL, put(*BLOCK, "hidden_size", value=HUGE))),
    of_model("layers without end", "num_layers: must be less than or equal to 4096, not 10000000000",
             spoiled(MODEL, put("groups", 1, "num_layers", value=10**10))),
    of_model("too many layers in groups", "groups: 6002 layers are more than the 4096 that can be planned",
             spoiled(MODEL, lambda data: data.update(
                 groups=[data["groups"][0], *[{**data["groups"][1], "num_layers": 3000}] * 2, data["groups"][2]]))),
    of_model("heads do not divide", "num_kv_heads (3) must divide num_heads (4)",
             spoiled(MODEL, put(*BLOCK, "attention", "num_kv_heads", value=3))),
    of_model("no groups", "groups must be one embedding, then at least one block, then one head",
             spoiled(MODEL, put("groups", value=[]))),
    of_model("groups not a list", "groups: must be a valid array, not an object",
             spoiled(MODEL, put("groups", value={}))),
    of_model("unknown kind of layer", "groups[1].layer: Input tag 'mixer'",
             spoiled(MODEL, put(*BLOCK, "kind", value="mixer"))),
    of_model("two sizes", "groups[0] (embedding) and groups[1] (block): hidden seq x 32 is handed on, but",
             spoiled(MODEL, put("groups", 0, "layer", "hidden_size", value=32))),
    of_model("half a surrogate pair", "m.json: ", spoiled(MODEL, put("name", value="\udc00"))),
    of_model("alias", "an alias is not supported; write it out", "groups: &g []\nname: *g\n", "m.yaml"),
]  # fmt: skip

CLUSTERS = [
    of_plan_option("device: 'abacus' is not known", cluster="8xabacus"),
    of_plan_option("cluster: '0xcpu' has no devices; nodes and devices must be at least 1", cluster="0xcpu"),
    of_plan_option("cluster: 'many' is not a cluster; write devices x kind", cluster="many"),
    of_plan_option("cluster: '-4xcpu' is not a cluster", cluster="-4xcpu"),
    of_plan_option("is not a cluster; write devices x kind", cluster="\uff14xcpu"),
    of_plan_option("cluster: '4.5xcpu' is not a cluster", cluster="4.5xcpu"),
    of_plan_option("cluster: 900000xcpu has 900000 devices; at most 16384", cluster="900000xcpu"),
    of_plan_option("is not a cluster; write devices x kind", cluster=f"{HUGE}xcpu"),
    of_plan_option("is not a cluster; write devices x kind", cluster="9" * 5000 + "xcpu"),
    of_plan_option("c.yaml: no such file", cluster="c.yaml"),
    of_yaml("tab", "line 2, column 1: found character '\\t' that cannot start any token",
               "name: mine\n\tnum_nodes: 1\n"),
    of_yaml("code in a tag", "line 1, column",
               'name: !!python/object/apply:os.system ["touch it-ran"]\n'),
    of_yaml("code in another tag", "line 1, column",
               '!!python/object/new:subprocess.Popen [["touch", "it-ran"]]\n'),
    of_yaml("aliases that multiply", "line 2, column 10: an alias is not supported; write it out", BOMB),
    of_yaml("itself inside", "line 1, column 5: an alias is not supported", "&a [*a]\n"),
    of_cluster("key twice", "key 'name' is there twice", "name: a\nname: b\n"),
    of_yaml("two documents", "line 2, column 1: but found another document",
               "name: a\n---\nname: b\n"),
    of_cluster("empty", "c.yaml: must be an object, not None", ""),
    of_cluster("list", "c.yaml: must be an object, not a list", "- 1\n- 2\n"),
    of_cluster("bytes", "c.yaml: holds more than text, numbers, lists and objects", "name: !!binary aGVsbG8=\n"),
    of_cluster("a date for a number", "num_nodes: must be a valid integer, not '2026-01-01'",
               with_text(CLUSTER, ("num_nodes",), "2026-01-01")),
    of_cluster("yes for a number", "num_nodes: must be a valid integer, not True",
               with_text(CLUSTER, ("num_nodes",), "yes")),
    of_cluster("a model", "c.yaml: is another kind of file: it has none of the keys name, num_nodes",
               "hidden_size: 3\n"),
    of_cluster("zero devices", "devices_per_node: must be greater than or equal to 1, not 0",
               spoiled(CLUSTER, put("devices_per_node", value=0))),
    of_cluster("negative nodes", "num_nodes: must be greater than or equal to 1, not -1",
               spoiled(CLUSTER, put("num_nodes", value=-1))),
    of_cluster("many devices", "cluster: c.yaml has 4000000000 devices; at most 16384 can be planned for",
               spoiled(CLUSTER, put("num_nodes", value=10**9))),
    of_cluster("above an integer", "num_nodes: must be less than or equal to 9223372036854775807, not 1000",
               spoiled(CLUSTER, put("num_nodes", value=HUGE))),
    of_cluster("unknown key", "gpu: unknown key", spoiled(CLUSTER, put("gpu", value=1))),
    of_cluster("missing key", "intra_node: required, but missing", spoiled(CLUSTER, drop("intra_node"))),
    of_cluster("text for a rate", "device.fp32_flops_per_s: must be a valid number, not '1 TFLOP/s'",
               spoiled(CLUSTER, put("device", "fp32_flops_per_s", value="1 TFLOP/s"))),
    of_cluster("NaN", "device.memory_bytes_per_s: must be a finite number, not nan",
               with_text(CLUSTER, ("device", "memory_bytes_per_s"), ".nan")),
    of_cluster("infinity", "intra_node.latency_s: must be a finite number, not inf",
               with_text(CLUSTER, ("intra_node", "latency_s"), ".inf")),
    of_cluster("efficiency above 1", "intra_node: efficiency is at most 1, not 1.5",
               spoiled(CLUSTER, put("intra_node", "efficiency", value=1.5))),
    of_cluster("newer", "schema_version: 9 is newer than this meshwright reads (1); upgrade meshwright",
               spoiled(CLUSTER, put("schema_version", value=9))),
    of_cluster("unknown backend", "device.backend: must be 'cpu' or 'cuda', not 'tpu'",
               spoiled(CLUSTER, put("device", "backend", value="tpu"))),
]  # fmt: skip

JOBS = [
    of_plan_option("space: 'biggest' is not known; choose one of full", space="biggest"),
    of_plan_option("global-batch: '-4' is not a batch size; write 64, 8..512 or auto", global_batch="-4"),
    of_plan_option("global-batch: '0' is not a batch size", global_batch="0"),
    of_plan_option("global-batch: '16..8' is not a batch size", global_batch="16..8"),
    of_plan_option("global-batch: 'lots' is not a batch size", global_batch="lots"),
    of_plan_option("global-batch: '8.5' is not a batch size", global_batch="8.5"),
    of_plan_option("up to 1048576 samples", global_batch=str(HUGE)),
    of_plan_option("up to 1048576 samples", global_batch="1..99999999"),
    of_plan_option("is not a batch size", global_batch="\uff18"),
    of_plan_option("dropout: must be less than 1, not 1.0", dropout="1.0"),
    of_plan_option("dropout: must be greater than or equal to 0, not -0.1", dropout="-0.1"),
    of_plan_option("dropout: must be a finite number, not nan", dropout="nan"),
    of_plan_option("seq-len: 512 is above what tiny-llama has positions for (256)", seq_len="512"),
    of_plan_option("seq-len: 1000", seq_len=str(HUGE)),
    of_plan_option("memory: '-5GB' is not a size; write a number and a unit, such as 80GiB", memory="-5GB"),
    of_plan_option("memory: '0GB' is not a positive number of bytes", memory="0GB"),
    of_plan_option("memory: 'nan' is not a size", memory="nan"),
    of_plan_option("memory: 'inf' is not a size", memory="inf"),
    of_plan_option("memory: '4 GigaByte' is not a size", memory="4 GigaByte"),
    of_plan_option("memory: '4GiBB' is not a size", memory="4GiBB"),
    of_plan_option("memory: '4' would be 4 bytes; write a unit, such as 4GiB", memory="4"),
    of_plan_option("memory: '' is not a size", memory=""),
    of_plan_option("memory: 5GiB is more than a cpu has (4.00 GiB)", memory="5GiB"),
    of_plan_option("is more than a cpu has", memory=f"{HUGE}GiB"),
    of_plan_option("memory: '1e400GiB' is not a positive number of bytes", memory="1e400GiB"),
    of_plan_option("reserved_bytes (4.00 GiB) leaves nothing of 4.00 GiB of memory; reserve", reserve="4GiB"),
    of_plan_option("reserve: 'some' is not a size", reserve="some"),
    of_plan_option("stages: 3 does not divide 4 devices; use one of 1, 2, 4", stages="3"),
    of_plan_option("does not divide 4 devices; use one of 1, 2, 4", stages=str(HUGE)),
    of_plan_option("stages: space ddp has no plan of 2 stages", stages="2", space="ddp"),
    of_plan_option("micro-batches: 3 does not divide the global batch (8)", micro_batches="3"),
    of_plan_option("does not divide the global batch (8)", micro_batches=str(HUGE)),
    of_plan_option("time-limit: inf is not a number of seconds", time_limit="inf"),
    of_predict("tp: 3 does not divide 4 devices of a stage; use one of 1, 2, 4", tp="3"),
    of_predict("block: tp 4 does not divide num_kv_heads=2; allowed: 1, 2", tp="4"),
    of_predict("pp: 3 does not divide 4 devices; use one of 1, 2, 4", pp="3"),
    of_predict("pp: 8 stages need at least 8 blocks", cluster="8xcpu", pp="8"),
    of_predict("dp 4 does not divide the micro-batch of 2 samples", micro_batches="4"),
    of_predict("micro-batches: 3 does not divide 8 samples a step; use one of 1, 2, 4, 8", micro_batches="3"),
    of_predict("dp-shard: 2 needs zero-stage 2 or 3", dp_shard="2"),
    of_predict("dp-shard: 3 does not divide a dp of 4; use one of 1, 2, 4", dp_shard="3", zero_stage="3"),
    of_predict("zero-stage: 3 shards over data-parallel ranks", cluster="1xcpu", zero_stage="3"),
    of_predict("seq-len: 257 is above what tiny-llama has positions for (256)", seq_len="257"),
    of_predict("global_batch_size: must be less than or equal to 1048576", global_batch=str(HUGE)),
    of_predict(" does not divide 4 devices; use one of 1, 2, 4", pp=str(HUGE)),
    Bad(name="predict: half a question", command=("predict", "--model", "gpt2"),
        says="predict: give a plan file, or also --cluster, --global-batch"),
]  # fmt: skip

PROFILES = [
    of_plan_option("p.json: no such file", profile="p.json"),
    Bad(name="profile: folder", command=ask(profile="p"), says="p: cannot be read: Is a directory", files={"p/": ""}),
    of_profile("the same twice", "matmuls holds two samples of the same thing; keep one of them",
               spoiled(PROFILE, lambda data: data["matmuls"].append(data["matmuls"][0]))),
    of_profile("absurd seconds", "matmuls[0].seconds: must be less than or equal to 600000",
               spoiled(PROFILE, put("matmuls", 0, "seconds", value=1e300))),
    of_profile("empty file", "p.json: not readable as JSON: Expecting value", ""),
    of_profile("truncated", "p.json: not readable as JSON: ", PROFILE[: len(PROFILE) // 2]),
    of_profile("a plan", "p.json: is another kind of file: it has none of the keys device, backend", PLAN),
    of_profile("newer", "schema_version: 99 is newer than this meshwright reads",
               spoiled(PROFILE, put("schema_version", value=99))),
    of_profile("no version of ours", "schema_version: must be",
               spoiled(PROFILE, put("schema_version", value="first"))),
    of_profile("negative seconds", "matmuls[0].seconds: must be greater than or equal to 0.000000000001, not -1.0",
               spoiled(PROFILE, put("matmuls", 0, "seconds", value=-1.0))),
    of_profile("zero seconds", "launches[0].seconds: must be greater than or equal to 0.000000000001, not 0",
               spoiled(PROFILE, put("launches", 0, "seconds", value=0))),
    of_profile("NaN", "copies[0].seconds: must be a finite number, not nan",
               spoiled(PROFILE, put("copies", 0, "seconds", value=float("nan")))),
    of_profile("infinity", "collectives[0].seconds: must be a finite number, not inf",
               spoiled(PROFILE, put("collectives", 0, "seconds", value=float("inf")))),
    of_profile("unknown operation", "collectives[0].op: must be 'all_reduce', ",
               spoiled(PROFILE, put("collectives", 0, "op", value="gossip"))),
    of_profile("no ranks", "num_ranks: must be greater than or equal to 1, not 0",
               spoiled(PROFILE, put("num_ranks", value=0))),
    of_profile("a fraction of a rank", "num_ranks: must be a valid integer, not 2.5",
               spoiled(PROFILE, put("num_ranks", value=2.5))),
    of_profile("unknown key", "temperature: unknown key", spoiled(PROFILE, put("temperature", value=80))),
    of_profile("samples not a list", "matmuls: must be a valid array, not an object",
               spoiled(PROFILE, put("matmuls", value={}))),
    of_profile("another backend", "profile: was measured on cuda, but 4xcpu is cpu",
               spoiled(PROFILE, put("backend", value="cuda"))),
]  # fmt: skip
