"""Bad plans, checkpoints, data, tokenizers, metrics, output paths and command lines."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import safetensors.numpy

from meshwright.files import sha256
from tests.cli.bad import CLUSTER, PLAN, Bad, Change, Content, ask, drop, good_plan, put, question, spoiled

HUGE = 10**30
RUN = ("stages", 0, "runs", 0)
TEXT = "".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(300))
SHARD = safetensors.numpy.save({"model.layers.0.weight": np.zeros((4, 4), np.float32)})
STEP = "run/checkpoints/step-00000003"
CHECKPOINT: dict[str, Any] = {
    "schema_version": 1,
    "model_sha256": sha256(good_plan().model),
    "model": "tiny-llama",
    "step": 3,
    "num_samples": 24,
    "torch_version": "2",
    "files": [{"name": "a.safetensors", "num_bytes": len(SHARD)}],
    "data": {"seed": 0, "seq_len": 64, "tokens_sha256": "0" * 64, "held_out_fraction": 0.05},
}
MARKER = "it-ran"


class _Evil:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (MARKER, "w")


EVIL = pickle.dumps(_Evil())


def train(*options: str) -> tuple[str, ...]:
    return ("train", "plan.json", "--local", "4", *options)


def of_plan(name: str, says: str, change: Change, command: str = "show") -> Bad:
    """Return a row with a plan file whose data are changed."""
    return Bad(name=f"{command}: {name}", command=(command, "plan.json"), says=says,
               files={"plan.json": spoiled(PLAN, change)})  # fmt: skip


def of_content(name: str, says: str, content: Content) -> Bad:
    return Bad(name=f"show: {name}", command=("show", "plan.json"), says=says, files={"plan.json": content})


def of_checkpoint(name: str, says: str, files: dict[str, Content], resume: str = "run") -> Bad:
    """Return a row that resumes from a checkpoint with these files."""
    placed = {"plan.json": PLAN} | {f"{STEP}/{file}": content for file, content in files.items()}
    return Bad(name=f"checkpoint: {name}", command=train("--resume", resume), says=says, files=placed)


def of_description(name: str, says: str, **changes: Any) -> Bad:
    """Return a row whose checkpoint is whole but for its description."""
    return of_checkpoint(name, says, {"a.safetensors": SHARD, "checkpoint.json": json.dumps(CHECKPOINT | changes)})


def of_shard(name: str, says: str, shard: bytes) -> Bad:
    """Return a row whose checkpoint is whole but for its tensors, which have the length that they should."""
    files = [{"name": "a.safetensors", "num_bytes": len(shard)}]
    return of_checkpoint(
        name, says, {"a.safetensors": shard, "checkpoint.json": json.dumps(CHECKPOINT | {"files": files})}
    )


def of_data(name: str, says: str, files: dict[str, Content], *options: str, keeps: str = "") -> Bad:
    """Return a row that trains on these files."""
    return Bad(name=f"data: {name}", command=train(*options), says=says, files={"plan.json": PLAN} | files, keeps=keeps)


def of_tokenizer(name: str, says: str, content: Content) -> Bad:
    files = {"text.txt": TEXT, "tokenizer.json": content}
    return of_data(f"tokenizer: {name}", says, files, "--data", "text.txt", "--tokenizer", "tokenizer.json")


def of_metrics(name: str, says: str, *records: Any, **more: Content) -> Bad:
    """Return a row that compares the plan with these records of a run."""
    lines = "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)
    files = {"good.json": PLAN, "run/metrics.jsonl": lines} | {f"run/{key}.json": text for key, text in more.items()}
    return Bad(name=f"metrics: {name}", command=("compare", "good.json", "run"), says=says, files=files)


def a_step(**changes: Any) -> dict[str, Any]:
    parts = {part: [0.1] * 4 for part in ("forward", "backward", "waiting", "sync", "optimizer")}
    return {"kind": "step", "step_s": 1.0, "peak_memory_bytes": [1 << 20] * 4, "parts_s": parts} | changes


def words(vocabulary: dict[str, int]) -> str:
    """Return a tokenizer.json that splits at spaces."""
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
    return json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}})


PLANS = [
    *(
        Bad(name=f"{command}: missing file", command=(command, "none.json"), says="none.json: no such file")
        for command in ("show", "predict", "train")
    ),
    *(
        of_plan("unknown key", "plan.json: color: unknown key", put("color", value="red"), command)
        for command in ("predict", "train")
    ),
    of_plan("unknown key, as the user wrote it", "plan.json: Big-Colour: unknown key", put("Big-Colour", value=1)),
    of_plan("unknown key inside", "job.sequence: unknown key", put("job", "sequence", value=5)),
    of_plan("newer", "schema_version: 2 is newer than this meshwright reads (1)", put("schema_version", value=2)),
    of_plan("no stages", "stages: required, but missing", drop("stages")),
    of_plan("stages empty", "stages: a plan needs at least one stage", put("stages", value=[])),
    of_plan("stages null", "stages: must be a valid array, not None", put("stages", value=None)),
    of_plan("stage without layers", "runs: a stage needs at least one layer", put("stages", 0, "runs", value=[])),
    of_plan("NaN", "memory_bytes_per_s: must be a finite number",
            put("cluster", "device", "memory_bytes_per_s", value=float("nan"))),
    of_plan("infinity", "latency_s: must be a finite number",
            put("cluster", "intra_node", "latency_s", value=float("inf"))),
    of_plan("NaN in the prediction", "predicted.step_s: must be a finite number, not nan",
            put("predicted", "step_s", value=float("nan"))),
    of_plan("negative memory", "budget.memory_bytes: must be greater than or equal to 1, not -1",
            put("budget", "memory_bytes", value=-1)),
    of_plan("huge memory", "budget.memory_bytes: must be less than or equal to 9223372036854775807, not 1000",
            put("budget", "memory_bytes", value=HUGE)),
    of_plan("text for a number", "num_devices: must be a valid integer, not '4'",
            put("num_devices", value="4")),
    of_plan("more devices", "num_devices (5) is above the cluster's 4", put("num_devices", value=5)),
    of_plan("huge devices", "num_devices: must be less than or equal to", put("num_devices", value=HUGE)),
    of_plan("fewer devices", "covers 4 devices, but a stage has 2", put("num_devices", value=2)),
    of_plan("micro-batches do not divide", "num_micro_batches (3) does not divide global_batch_size (8)",
            put("num_micro_batches", value=3)),
    of_plan("no batch", "global_batch_size: must be greater than or equal to 1, not 0",
            put("global_batch_size", value=0)),
    of_plan("huge batch in the job", "job.global_batch_size: must be less than or equal to 1048576, not 1000",
            put("job", "global_batch_size", value=HUGE)),
    of_plan("unknown schedule", "schedule: must be '1f1b' or 'gpipe', not 'zigzag'",
            put("schedule", value="zigzag")),
    of_plan("sequence too long", "job.seq_len: 1000 is above what tiny-llama has", put("job", "seq_len", value=1000)),
    of_plan("more layers in the model", "6 layers planned, but tiny-llama has 11",
            put("model", "groups", 1, "num_layers", value=9)),
    of_plan("more layers in the plan", "7 layers planned, but tiny-llama has 6", put(*RUN, "num_layers", value=7)),
    of_plan("fewer layers in the plan", "5 layers planned, but tiny-llama has 6", put(*RUN, "num_layers", value=5)),
    of_plan("layers without end", "layers planned, but tiny-llama has 6", put(*RUN, "num_layers", value=10**12)),
    of_plan("wider strategy", "covers 8 devices, but a stage has 4", put(*RUN, "strategy", "cp", value=2)),
    of_plan("degrees that do not divide", "stages[0].runs[0].strategy: tp 4 does not divide num_kv_heads=2",
            put(*RUN, "strategy", value={"tp": 4})),
    of_plan("shards nothing", "zero_stage 0 shards nothing, but dp_shard is 4",
            put(*RUN, "strategy", value={"dp_shard": 4})),
    of_plan("zero stage 4", "strategy.zero_stage: must be 0, 1, 2 or 3, not 4",
            put(*RUN, "strategy", "zero_stage", value=4)),
    of_plan("no degree", "strategy.tp: must be greater than or equal to 1, not 0",
            put(*RUN, "strategy", "tp", value=0)),
    of_plan("number for a hash", "inputs_sha256: must be a valid string, not 5",
            put("inputs_sha256", value=5)),
    of_plan("other model inside", "model: must be an object, not 'tiny-llama'",
            put("model", value="tiny-llama")),
    of_plan("learning rate 0", "job.optimizer.lr: must be greater than 0, not 0",
            put("job", "optimizer", "lr", value=0)),
    of_plan("beta of 1", "job.optimizer: beta1 must be below 1, not 1.0", put("job", "optimizer", "beta1", value=1.0)),
    of_plan("what cannot run yet", "zero_stage 1 can be priced but not run yet; use 0, 2 or 3",
            put(*RUN, "strategy", value={"dp_shard": 4, "zero_stage": 1}), "train"),
    of_content("truncated", "plan.json: not readable as JSON: ", PLAN[:-200]),
    of_content("empty file", "plan.json: not readable as JSON: Expecting value", ""),
    of_content("list", "plan.json: must be an object, not a list", "[1, 2]"),
    of_content("not text", "plan.json: not a UTF-8 text file", b"\xff\xfe\x00"),
    of_content("a pickle", "plan.json: not a UTF-8 text file", EVIL),
    of_content("nested without end", "plan.json: not readable as JSON", "[" * 100_000),
    of_content("key twice", "plan.json: not readable as JSON: key 'job' is there twice", '{"job": 1, "job": 2}'),
    of_content("a cluster", "plan.json: is another kind of file: it has none of the keys model, cluster", CLUSTER),
    Bad(name="show: folder", command=("show", "plans"), says="plans: cannot be read: Is a directory",
        files={"plans/": ""}),
    Bad(name="predict: file and options", command=("predict", "plan.json", "--model", "gpt2", "--seq-len", "8"),
        says="predict: a plan file says it all; leave out --model, --seq-len", files={"plan.json": PLAN}),
]  # fmt: skip

CHECKPOINTS = [
    Bad(name="checkpoint: missing", command=train("--resume", "none"), says="none: no such folder",
        files={"plan.json": PLAN}),
    Bad(name="checkpoint: a file", command=train("--resume", "plan.json"), says="plan.json: is a file; name the folder",
        files={"plan.json": PLAN}),
    Bad(name="checkpoint: long name", command=train("--resume", "y" * 5000), says="cannot be read: File name too long",
        files={"plan.json": PLAN}),
    Bad(name="checkpoint: empty run", command=train("--resume", "run"), says="run: holds no whole checkpoint",
        files={"plan.json": PLAN, "run/": ""}),
    of_checkpoint("empty", "run: holds no whole checkpoint", {"": ""}),
    Bad(name="checkpoint: left over", command=train("--resume", f"{STEP}.partial"),
        says="is left over from a save that did not end; name run instead",
        files={"plan.json": PLAN, f"{STEP}.partial/checkpoint.json": json.dumps(CHECKPOINT)}),
    Bad(name="checkpoint: of a run before", command=train("--run-dir", "run"),
        says="run-dir: run holds checkpoints of an earlier run (step-00000003); go on from them with --resume run",
        files={"plan.json": PLAN, f"{STEP}/checkpoint.json": json.dumps(CHECKPOINT)}),
    of_checkpoint("only pickles", "run: holds no whole checkpoint: run/checkpoints/step-00000003 is torn (",
                  {"evil.pt": EVIL, "__0_0.distcp": EVIL, ".metadata": EVIL}),
    of_checkpoint("only pickles, named itself", f"{STEP}: holds no whole checkpoint",
                  {"evil.pt": EVIL, "__0_0.distcp": EVIL, ".metadata": EVIL}, resume=STEP),
    of_checkpoint("a pickle for its description", "checkpoint.json: not a UTF-8 text file", {"checkpoint.json": EVIL}),
    of_checkpoint("a pickle for a shard", "a.safetensors is not a safetensors file",
                  {"a.safetensors": EVIL, "checkpoint.json": json.dumps(
                      CHECKPOINT | {"files": [{"name": "a.safetensors", "num_bytes": len(EVIL)}]})}),
    of_checkpoint("a pickle among its files", "'evil.pt' is no file of a checkpoint",
                  {"evil.pt": EVIL, "checkpoint.json": json.dumps(
                      CHECKPOINT | {"files": [{"name": "evil.pt", "num_bytes": len(EVIL)}]})}),
    of_checkpoint("truncated description", "checkpoint.json: not readable as JSON",
                  {"a.safetensors": SHARD, "checkpoint.json": json.dumps(CHECKPOINT)[:100]}),
    of_checkpoint("empty description", "checkpoint.json: not readable as JSON",
                  {"a.safetensors": SHARD, "checkpoint.json": ""}),
    of_checkpoint("a plan for a description", "model_sha256: required, but missing",
                  {"a.safetensors": SHARD, "checkpoint.json": PLAN}),
    of_description("text for a step", "step: must be a valid integer, not 'three'", step="three"),
    of_description("negative step", "step: must be greater than or equal to 0, not -3", step=-3),
    of_description("NaN share", "data.held_out_fraction: must be a finite number",
                   data=CHECKPOINT["data"] | {"held_out_fraction": float("nan")}),
    of_description("newer", "schema_version: 5 is newer than this meshwright reads", schema_version=5),
    of_description("unknown key", "pickle: unknown key", pickle="evil.pt"),
    of_description("no files", "checkpoint.json names no files", files=[]),
    of_description("a file outside", "'../a.safetensors' is no file of a checkpoint",
                   files=[{"name": "../a.safetensors", "num_bytes": 5}]),
    of_description("a file that is gone", "b.safetensors is missing",
                   files=[{"name": "b.safetensors", "num_bytes": 5}]),
    of_description("another model", "is of gpt2, a model other than the plan's tiny-llama",
                   model="gpt2", model_sha256="0" * 64),
    of_description("other sizes", "is of tiny-llama, with other layers or sizes than the plan's tiny-llama",
                   model_sha256="0" * 64),
    of_checkpoint("truncated shard", f"a.safetensors has {len(SHARD) - 8} bytes instead of {len(SHARD)}",
                  {"a.safetensors": SHARD[:-8], "checkpoint.json": json.dumps(CHECKPOINT)}),
    of_shard("shard cut with its description", "a.safetensors is not a safetensors file", SHARD[:-8]),
    of_shard("absurd header length", "a.safetensors is not a safetensors file", b"\xff" * 8 + SHARD[8:]),
    of_shard("header not JSON", "a.safetensors is not a safetensors file", (64).to_bytes(8, "little") + b"x" * 64),
    of_shard("empty shard", "a.safetensors is not a safetensors file", b""),
    of_shard("text", "a.safetensors is not a safetensors file", TEXT.encode()),
]  # fmt: skip

DATA = [
    of_data("missing", "data: none.txt: no such file or folder", {}, "--data", "none.txt"),
    of_data("no name", "data: '' is not a source; give a text file", {}, "--data", ""),
    of_data("long name", "cannot be read: File name too long", {}, "--data", "y" * 5000),
    of_data("device", "dev/zero: is a device, not a file", {}, "--data", "/dev/zero"),
    of_data("empty file", "data: the sources hold no text", {"e.txt": ""}, "--data", "e.txt"),
    of_data("empty folder", "data: d: no file in this folder ends in .txt, .md, .jsonl", {"d/": ""}, "--data", "d"),
    of_data("folder without text", "no file in this folder ends in .txt", {"d/a.png": b"\x89PNG"}, "--data", "d"),
    of_data("not text", "d.txt: not a UTF-8 text file", {"d.txt": b"caf\xe9"}, "--data", "d.txt"),
    of_data("a pickle", "d.txt: not a UTF-8 text file", {"d.txt": EVIL}, "--data", "d.txt"),
    of_data("one bad file of two", "d/b.txt: not a UTF-8 text file", {"d/a.txt": TEXT, "d/b.txt": b"\xff"},
            "--data", "d"),
    of_data("broken line", "d.jsonl: line 2: not JSON", {"d.jsonl": '{"text": "a"}\n{"text": \n'}, "--data", "d.jsonl"),
    of_data("other field", 'd.jsonl: line 1: needs an object with a field "text"', {"d.jsonl": '{"body": "a"}\n'},
            "--data", "d.jsonl"),
    of_data("number for text", 'd.jsonl: line 1: needs an object with a field "text"', {"d.jsonl": '{"text": 3}\n'},
            "--data", "d.jsonl"),
    of_data("lines not text", "d.jsonl: not a UTF-8 text file", {"d.jsonl": b'{"text": "caf\xe9"}\n'},
            "--data", "d.jsonl"),
    of_data("half a surrogate pair", "d.jsonl: line 1: text holds half a surrogate pair",
            {"d.jsonl": '{"text": "\\ud800"}\n'}, "--data", "d.jsonl"),
    of_data("too short", "data: the train split has 11 tokens, but one sample of seq_len 64 needs 65; give more text",
            {"d.txt": "short text"}, "--data", "d.txt", "--held-out", "0", keeps="runs/cache/tokens-*"),
    of_data("too little held out", "data: the held_out split has", {"d.txt": TEXT[:200]}, "--data", "d.txt",
            keeps="runs/cache/tokens-*"),
    of_data("cache below a file", "cannot be written: Not a directory", {"d.txt": TEXT},
            "--data", "d.txt", "--cache-dir", "d.txt/cache"),
    of_data("cache of a long name", "cannot be read: File name too long; choose another folder", {"d.txt": TEXT},
            "--data", "d.txt", "--cache-dir", "y" * 5000),
    of_data("cache that cannot be", "cannot be written", {"d.txt": TEXT},
            "--data", "d.txt", "--cache-dir", "/proc/nowhere"),
    of_data("tokenizer: missing", "none.json: no such file", {"d.txt": TEXT},
            "--data", "d.txt", "--tokenizer", "none.json"),
    of_tokenizer("empty", "tokenizer.json: not a tokenizer.json: ", ""),
    of_tokenizer("truncated", "tokenizer.json: not a tokenizer.json: ", words({"?": 0})[:60]),
    of_tokenizer("no model", "tokenizer.json: not a tokenizer.json: ", "{}"),
    of_tokenizer("unknown model", "tokenizer.json: not a tokenizer.json: ",
                 '{"version": "1.0", "model": {"type": "Z"}}'),
    of_tokenizer("list", "tokenizer.json: not a tokenizer.json: ", "[1]"),
    of_tokenizer("a pickle", "tokenizer.json: not a UTF-8 text file", EVIL),
    of_tokenizer("more words than the model", "data: token id 300 is not below the model's vocab_size (256)",
                 words({"?": 0, "and": 300})),
    Bad(name="train: other number of ranks", command=("train", "plan.json", "--local", "3"),
        says="local: the plan is for 4 ranks, not 3; use --local 4", files={"plan.json": PLAN}),
    Bad(name="train: no launcher", command=("train", "plan.json"),
        says="start the ranks with torchrun, or with --local N", files={"plan.json": PLAN}),
    Bad(name="profile: no launcher", command=("profile", "-o", "p.json"),
        says="start the ranks with torchrun, or with --local N"),
    Bad(name="profile: no such GPUs", command=("profile", "-o", "p.json", "--backend", "cuda", "--local", "99"),
        says="local: 99 ranks need a GPU each, but torch finds"),
    Bad(name="profile: unknown model", command=("profile", "-o", "p.json", "--local", "2", "--model", "llama-9"),
        says="model: 'llama-9' is neither a known model nor a file"),
]  # fmt: skip

METRICS = [
    Bad(name="metrics: missing", command=("compare", "good.json", "none"), says="none: no such file",
        files={"good.json": PLAN}),
    Bad(name="metrics: no file in the folder", command=("compare", "good.json", "run"),
        says="run/metrics.jsonl: no such file", files={"good.json": PLAN, "run/": ""}),
    of_metrics("empty", "run/metrics.jsonl: holds no steps"),
    of_metrics("no steps", "run/metrics.jsonl: holds no steps", {"kind": "start"}),
    of_metrics("truncated", "run/metrics.jsonl: line 2: not readable as JSON", a_step(), '{"kind": "st'),
    of_metrics("list", "run/metrics.jsonl: line 1: is not a JSON object", [1, 2]),
    of_metrics("other ranks", "run/metrics.jsonl: is of 2 ranks, but the plan is for 4",
               a_step(peak_memory_bytes=[1, 1], parts_s={})),
    of_metrics("NaN", "step record 1: step_s: must be a finite number, not nan", a_step(step_s=float("nan"))),
    of_metrics("zero", "step record 1: step_s: must be greater than 0, not 0", a_step(step_s=0)),
    of_metrics("text", "step record 2: step_s: must be a valid number, not 'fast'",
               a_step(), a_step(step_s="fast")),
    of_metrics("no seconds", "step record 1: step_s: required, but missing",
               {name: value for name, value in a_step().items() if name != "step_s"}),
    of_metrics("negative peak", "peak_memory_bytes[0]: must be greater than or equal to 0, not -1",
               a_step(peak_memory_bytes=[-1] * 4)),
    of_metrics("peak not a list", "peak_memory_bytes: must be a valid array, not 5",
               a_step(peak_memory_bytes=5)),
    of_metrics("part missing", "parts_s.backward: is of 0 ranks, not 4", a_step(parts_s={"forward": [0.1] * 4})),
    of_metrics("another plan", "is of a run of another plan, run/plan.json: it differs in num_micro_batches", a_step(),
               plan=spoiled(PLAN, put("num_micro_batches", value=2))),
    Bad(name="metrics: no prediction", command=("compare", "good.json", "run"),
        says="plan: has no prediction; price it first",
        files={"good.json": spoiled(PLAN, put("predicted", value=None)), "run/metrics.jsonl": json.dumps(a_step())}),
]  # fmt: skip

OUTPUTS = [
    Bad(name="output: run folder is a file", command=train("--run-dir", "plan.json"),
        says="plan.json/metrics.jsonl: cannot be written: Not a directory", files={"plan.json": PLAN}),
    Bad(name="predict: options for another plan", command=("predict", "plan.json", "--tp", "2"),
        says="predict: a plan file says it all; leave out --tp", files={"plan.json": PLAN}),
    Bad(name="output: not a real folder", command=ask(output="/proc/nowhere/plan.json"),
        says="nowhere/plan.json: cannot be written: "),
    Bad(name="output: a folder", command=ask(output="out"), says="out: cannot be written: Is a directory",
        files={"out/": ""}),
    Bad(name="output: the folder itself", command=ask(output="."), says=".: cannot be written: Is a directory"),
    Bad(name="output: below a file", command=ask(output="a/plan.json"),
        says="a/plan.json: cannot be written: Not a directory", files={"a": "x"}),
    Bad(name="output: long name", command=ask(output="y" * 5000), says="cannot be written: File name too long"),
    Bad(name="output: read-only file", command=ask(output="ro.json"),
        says="ro.json: cannot be written: it is marked read-only", files={"ro.json": "{}"}),
]  # fmt: skip

USAGE = [
    Bad(name=f"usage: {name}", command=command, says=says)
    for name, command, says in (
        ("nothing", ("plan",), "missing option"),
        ("unknown command", ("fly",), "fly"),
        ("unknown option", (*ask(), "--fast"), "--fast"),
        ("no value", (*ask(), "--memory"), "--memory"),
        ("seq-len 0", ask(seq_len="0"), "--seq-len"),
        ("seq-len -1", ask(seq_len="-1"), "--seq-len"),
        ("seq-len long", ask(seq_len="long"), "--seq-len"),
        ("seq-len nan", ask(seq_len="nan"), "--seq-len"),
        ("seq-len 64.5", ask(seq_len="64.5"), "--seq-len"),
        ("dtype fp8", ask(dtype="fp8"), "--dtype"),
        ("schedule zigzag", ask(schedule="zigzag"), "--schedule"),
        ("stages 0", ask(stages="0"), "--stages"),
        ("micro-batches -2", ask(micro_batches="-2"), "--micro-batches"),
        ("time-limit 0", ask(time_limit="0"), "--time-limit"),
        ("time-limit soon", ask(time_limit="soon"), "--time-limit"),
        ("zero-stage 4", ("predict", *question(zero_stage="4")), "--zero-stage"),
        ("no plan", ("train",), "missing argument"),
        ("local 0", train("--local", "0"), "--local"),
        ("task flying", train("--task", "flying"), "--task"),
        ("held-out 1", train("--held-out", "1"), "--held-out"),
        ("steps 0", train("--steps", "0"), "--steps"),
        ("seed -1", train("--seed", "-1"), "--seed"),
        ("an argument more", ("show", "a.json", "b.json"), "unexpected extra argument"),
        ("no metrics", ("compare", "plan.json"), "missing argument"),
    )
]

OTHERS = [
    Bad(name="schema: unknown", command=("schema", "plans"),
        says="schema: 'plans' is not a format; choose one of plan, model"),
]  # fmt: skip
