"""The shipped models and devices against published numbers, and what a user may write for them."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.errors import UserError
from meshwright.files import write_spec
from meshwright.spec.library import cluster, device, device_names, model, model_names
from meshwright.spec.parameters import num_parameters
from meshwright.units import GiB
from tests.spec import test_paper_models

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "swin-large": 196_735_516,
}
GPT3_ROUNDED = {  # arXiv 2005.14165, table 2.1
    "gpt3-125m": 125e6,
    "gpt3-350m": 350e6,
    "gpt3-760m": 760e6,
    "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13e9,
    "gpt3-175b": 175e9,
}
SMALL = {"tiny-gpt2", "tiny-llama", "demo-llama"}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_as_published(name: str, count: int):
    assert num_parameters(model(name)) == count


@pytest.mark.parametrize(("name", "count"), GPT3_ROUNDED.items())
def test_gpt3_parameters_as_in_the_paper(name: str, count: float):
    assert num_parameters(model(name)) == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_small_models_are_those_of_transformers(name: str):
    text = resources.files("meshwright.spec").joinpath("data", "models", f"{name}.json").read_text()
    fields = {key: value for key, value in json.loads(text).items() if not key.startswith("_")}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert num_parameters(model(name)) == sum(p.numel() for p in module.parameters())
    assert model(name).vocab_size == 256


def test_every_shipped_model_is_tested_above():
    small = SMALL | set(test_paper_models.SMALL)
    assert set(model_names()) == PUBLISHED.keys() | GPT3_ROUNDED.keys() | test_paper_models.PAPER.keys() | small


def test_names_ignore_case():
    assert model("GPT2-XL") is model("gpt2-xl")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2-x", "'gpt2-x' is neither a known model nor a file; did you mean gpt2-xl"),
        ("llama-2-7B-hf", "did you mean llama-2-7b"),
        ("???", "known: bert-base, bert-huge-32"),
        ("x" * 5000, "is neither a known model nor a file"),
        ("missing.json", "missing.json: no such file"),
        ("missing/model.yaml", "missing/model.yaml: no such file"),
    ],
)
def test_unknown_models(name: str, message: str):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        model(name)


def test_models_from_files(tmp_path):
    shipped = model("tiny-llama")
    for name in ("spec.yaml", "spec.json"):
        write_spec(shipped, tmp_path / name)
        assert model(tmp_path / name) == shipped
    config = resources.files("meshwright.spec").joinpath("data", "models", "tiny-llama.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert model(tmp_path).groups == model(tmp_path / "config.json").groups == shipped.groups
    assert model(tmp_path / "config.json").name == tmp_path.name
    (tmp_path / "other.yaml").write_text("hidden_size: 12")
    with pytest.raises(UserError, match=r"other\.yaml: neither a model file \(no groups\) nor a config\.json"):
        model(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "kind", "name"),
    [
        ("4xcpu", 1, 4, "cpu", "4xcpu"),
        ("8xa100-sxm-40g", 1, 8, "a100-sxm-40g", "8xa100-sxm-40g"),
        ("1x8xA100-SXM-40G", 1, 8, "a100-sxm-40g", "8xa100-sxm-40g"),
        (" 128 x 8 x h100-sxm ", 128, 8, "h100-sxm", "128x8xh100-sxm"),
    ],
)
def test_cluster_text(text: str, nodes: int, devices: int, kind: str, name: str):
    found = cluster(text)
    assert (found.num_nodes, found.devices_per_node, found.device.name, found.name) == (nodes, devices, kind, name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100-sxm", "'h100-sxm' is not a cluster; write devices x kind"),
        ("8x", "'8x' is not a cluster"),
        ("", "'' is not a cluster"),
        ("-8xcpu", "'-8xcpu' is not a cluster"),
        ("2x2x2xcpu", "'2x2x2xcpu' is not a cluster"),
        ("0xcpu", "'0xcpu' has no devices"),
        ("0x8xcpu", "'0x8xcpu' has no devices"),
        ("8xv9000", "device: 'v9000' is not known; known: a100-pcie-40g, a100-pcie-80g"),
        ("nowhere.yaml", "nowhere.yaml: no such file"),
    ],
)
def test_bad_cluster_text(text: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        cluster(text)
    assert "\n" not in str(caught.value)


def test_clusters_from_files(tmp_path):
    shipped = cluster("2x8xh100-sxm")
    write_spec(shipped, tmp_path / "mine.yaml")
    assert cluster(tmp_path / "mine.yaml") == shipped
    text = (tmp_path / "mine.yaml").read_text()
    (tmp_path / "bad.yaml").write_text(text.replace("num_nodes: 2", "num_nodes: two"))
    with pytest.raises(UserError, match=r"bad\.yaml: num_nodes: .*integer.*'two'"):
        cluster(tmp_path / "bad.yaml")


@pytest.mark.parametrize("name", device_names())
def test_devices_are_plausible_and_sourced(name: str):
    found, links = device(name), cluster(f"2x8x{name}")
    assert found.name == name
    assert found.bf16_flops_per_s > found.fp32_flops_per_s
    assert found.memory_bytes % GiB == 0
    assert len(found.source) > 50
    assert "measured" in found.source or "fitted" in found.source
    assert (found.overlap_slowdown is None) == (found.backend == "cpu")
    assert found.kernels == ("cpu_stock" if found.backend == "cpu" else "cuda_fused")
    assert links.intra_node.latency_s <= links.inter_node.latency_s
    assert device(name.upper()) == found


def test_datasheet_numbers():
    a100, h100 = device("a100-sxm-40g"), device("h100-sxm")
    assert (a100.bf16_flops_per_s, a100.memory_bytes, a100.memory_bytes_per_s) == (312e12, 40 * GiB, 1555e9)
    assert (h100.bf16_flops_per_s, h100.memory_bytes, h100.memory_bytes_per_s) == (989e12, 80 * GiB, 3350e9)
    assert cluster("8xa100-sxm-40g").intra_node.bytes_per_s == 300e9
    assert cluster("8xh100-sxm").inter_node.bytes_per_s == 50e9
    b200, mi300x = device("b200-sxm"), device("mi300x")
    assert (b200.bf16_flops_per_s, b200.matmul_efficiency) == (2250e12, pytest.approx(0.88 * 1745 / 2250, abs=1e-3))
    assert (mi300x.memory_bytes, mi300x.matmul_efficiency) == (192 * GiB, pytest.approx(0.88 * 668.4 / 1307, abs=1e-3))
    v100, limited = device("v100-sxm2-16g"), device("h100-sxm-96g-500w")
    assert (v100.bf16_flops_per_s, v100.memory_bytes, v100.memory_bytes_per_s) == (125e12, 16 * GiB, 900e9)
    assert (limited.bf16_flops_per_s, limited.memory_bytes, limited.memory_bytes_per_s) == (989e12, 96 * GiB, 2400e9)
