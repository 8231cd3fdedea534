"""Bad tasks, token files, images and labelled texts."""

from __future__ import annotations

import io
import json

import numpy as np

from meshwright.files import canonical_json
from meshwright.spec.families import model_from_config
from meshwright.spec.library import model
from meshwright.spec.model import ModelSpec
from meshwright.spec.strategy import Strategy
from tests.cli.bad import PLAN, Bad, Content, put, spoiled
from tests.cli.bad_runs import EVIL, TEXT, train
from tests.configs import BERT
from tests.plans import by_hand


def plan_of(spec: ModelSpec) -> str:
    """Return the plan of four replicas, with samples of the usual lengths."""
    plan = by_hand(
        spec, "4xcpu", [Strategy(dp_replicate=4)] * len(spec.layers), batch=8, seq_len=spec.usual_seq_len,
        target_seq_len=spec.usual_target_seq_len or None, dtype="fp32",
    )  # fmt: skip
    return canonical_json(plan)


CLASSIFIER = plan_of(
    model_from_config(
        BERT | {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_labels": 3},
        name="classifier",
        where="classifier",
    )
)
BERT_PLAN, T5_PLAN, VIT_PLAN = (plan_of(model(name)) for name in ("tiny-bert", "tiny-t5", "tiny-vit"))
_MADE = "runs/cache/tokens-*"


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def of_task(name: str, plan: str, says: str, files: dict[str, Content], *options: str, keeps: str = "") -> Bad:
    """Return a row that trains this plan on these files."""
    return Bad(name=f"task: {name}", command=train(*options), says=says, files={"plan.json": plan} | files, keeps=keeps)


def of_file(name: str, plan: str, says: str, file: str, content: Content, keeps: str = "") -> Bad:
    """Return a row that trains on one file."""
    return of_task(name, plan, says, {file: content}, "--data", file, keeps=keeps)


def of_label(name: str, says: str, *records: dict[str, object]) -> Bad:
    return of_file(name, CLASSIFIER, says, "t.jsonl", "".join(json.dumps(record) + "\n" for record in records))


IMAGES, LABELS = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 10

TASKS = [
    of_task("of another model", PLAN, "task: tiny-llama cannot be trained on masked; its layers allow causal", {},
            "--task", "masked"),
    of_task("causal for an encoder", BERT_PLAN, "task: tiny-bert cannot be trained on causal; its layers allow masked",
            {}, "--task", "causal"),
    of_task("images for text", VIT_PLAN, "tiny-vit cannot be trained on labelled-text; its layers allow images", {},
            "--task", "labelled-text"),
    of_file("no room for a mask", BERT_PLAN, "vocab_size: tiny-bert has 256 ids, but masking needs id 256", "t.txt",
            TEXT, _MADE),
    of_file("no room for sentinels", T5_PLAN, "vocab_size: tiny-t5 has 256 ids, but the tokens have 256 and a sample",
            "t.txt", TEXT, _MADE),
    of_file("targets too short", spoiled(T5_PLAN, put("job", "target_seq_len", value=2)),
            "target_seq_len: 2 is too short for one span with its sentinel and the end; plan at least 3", "t.txt",
            TEXT, _MADE),
    of_file("too little to mask", BERT_PLAN.replace('"vocab_size": 256', '"vocab_size": 257').replace(
            '"padded_vocab_size": 256', '"padded_vocab_size": 384'),
            "the train split has 95 tokens, but one sample of seq_len 128 needs 128", "t.txt", TEXT[:99], _MADE),
    of_file("an archive for text", PLAN, "data: i.npz holds arrays, and tiny-llama is trained on causal", "i.npz",
            npz(images=IMAGES, labels=LABELS)),
    of_task("a tokenizer for images", VIT_PLAN, "tokenizer: tiny-vit is trained on images, which have none", {},
            "--tokenizer", "vocab.txt"),
    of_file("half a token", PLAN, "data: t.u32: 6 bytes are no uint32 tokens", "t.u32", b"123456"),
    of_file("no tokens", PLAN, "data: t.bin: 0 bytes are no uint16 tokens", "t.bin", b""),
    of_file("a pickle for tokens", PLAN, "data: t.npy: not a .npy array", "t.npy", EVIL),
    of_file("a table of tokens", PLAN, "tokens must be one row of integers, not 5 x 5 of int64", "t.npy",
            npy(np.zeros((5, 5), int))),
    of_file("ids that the model lacks", PLAN, "token id 999 is not below the model's vocab_size (256)", "t.u16",
            np.full(99, 999, "<u2").tobytes(), _MADE),
    of_task("tokens beside text", PLAN, "data: t.u16 holds tokens and must be the only source, not one of 2",
            {"t.u16": b"12", "t.txt": TEXT}, "--data", "t.u16", "--data", "t.txt"),
    of_task("tokens that are not there", PLAN, "data: none.u16: no such file or folder", {}, "--data", "none.u16"),
    of_task("images that are not there", VIT_PLAN, "data: none: no such file or folder; pictures are", {},
            "--data", "none"),
    of_file("text for images", VIT_PLAN, "data: t.txt is not a folder with one folder a class", "t.txt", TEXT),
    of_task("a name for images", VIT_PLAN, "data: stdlib: no such file or folder; pictures", {}, "--data", "stdlib"),
    of_task("pictures without classes", VIT_PLAN, "data: d: has no folders; a folder of pictures has one folder a",
            {"d/a.png": b"\x89PNG"}, "--data", "d"),
    of_task("a class without pictures", VIT_PLAN, "no picture in this folder ends in .png, .jpg, .jpeg",
            {"d/a/x.txt": TEXT}, "--data", "d"),
    of_task("no picture", VIT_PLAN, "data: d/a/x.png: not a picture", {"d/a/x.png": TEXT}, "--data", "d"),
    of_file("no archive", VIT_PLAN, "data: i.npz: not an .npz of arrays", "i.npz", TEXT),
    of_file("a pickle for images", VIT_PLAN, "data: i.npz: not an .npz of arrays", "i.npz", EVIL),
    of_file("an array for an archive", VIT_PLAN, "data: i.npz: not an .npz of arrays", "i.npz", npy(IMAGES)),
    of_file("no labels", VIT_PLAN, "data: i.npz: has no array labels; it needs images and labels", "i.npz",
            npz(images=IMAGES)),
    of_file("blank images", VIT_PLAN, "images must be finite and differ, not lie in 0.0 .. 0.0", "i.npz",
            npz(images=IMAGES.astype(float), labels=LABELS)),
    of_file("more classes than the model", VIT_PLAN, "label 10 is not one of the model's classes, 0 to 9 (num_labels)",
            "i.npz", npz(images=IMAGES, labels=LABELS + 1)),
    of_file("labels of other images", VIT_PLAN, "labels must be 40 integers, not 39 of int64", "i.npz",
            npz(images=IMAGES, labels=LABELS[1:])),
    of_task("nothing held out", VIT_PLAN, "the held_out split of 40 samples is empty at held_out_fraction 0.001",
            {"i.npz": npz(images=IMAGES, labels=LABELS)}, "--data", "i.npz", "--held-out", "0.001"),
    of_task("no labelled texts", CLASSIFIER, "data: classifier is trained on labelled-text, for which there are", {}),
    of_file("texts without labels", CLASSIFIER, "data: 't.txt' is not a .jsonl file; labelled texts", "t.txt", TEXT),
    of_label("label missing", 't.jsonl: line 1: needs a field "label"', {"text": "a"}),
    of_label("label a fraction", 'needs a field "label" that holds a class number or a name, not 1.5',
             {"text": "a", "label": 1.5}),
    of_label("labels mixed", "line 2: label 'b': labels must be all numbers or all names",
             {"text": "a", "label": 1}, {"text": "a", "label": "b"}),
    of_label("label too high", "label 3 is not one of the model's classes, 0 to 2 (num_labels)",
             *({"text": "a", "label": number % 4} for number in range(40))),
    of_task("no word pieces", PLAN, "v/vocab.txt: has no line [UNK]", {"t.txt": TEXT, "v/vocab.txt": "a\nb\n"},
            "--data", "t.txt", "--tokenizer", "v"),
]  # fmt: skip
