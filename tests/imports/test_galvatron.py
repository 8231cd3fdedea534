"""Import of Galvatron's profiles: each format by hand, into a Profile, broken files, and all that were published."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.cost.fit import fitted_cluster
from meshwright.errors import UserError
from meshwright.files import read_spec, write_spec
from meshwright.imports.galvatron import GalvatronProfile, read_galvatron, set_names
from meshwright.imports.galvatron_files import read_computation, read_memory
from meshwright.imports.galvatron_profile import Converted, model_from_meta, to_profile
from meshwright.search import planner
from meshwright.search.engine import Found
from meshwright.spec import library
from meshwright.spec.model import BlockLayer, HeadLayer
from meshwright.spec.profile import Profile
from meshwright.units import MiB
from tests.cli.conftest import Run, run  # noqa: F401 a fixture

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "peer" / "profiles"
Data = dict[str, Any]

META: Data = {
    "dim": 64, "multiple_of": 32, "n_heads": 4, "n_layers": 3, "norm_eps": 1e-5, "vocab_size": 300, "n_positions": 128,
}  # fmt: skip
COMPUTATION: Data = {
    "layernum[1]_bsz2_seq64": 7.0,
    "layertype_0_bsz1_seq64": 2.5,
    "layertype_other_bsz1_seq64": 1.5,
    "layertype_0_bsz2_seq64": 2.0,
    "layertype_other_bsz2_seq64": 1.25,
}
MEMORY: Data = {
    "1_1_4_sp": {"layernum[1]_bsz8_seq64_rank0_ms": 10.5},
    "layertype_0_sp": {
        "64": {"parameter_size": 3.0, "tp_activation_per_bsz_dict": {"1": 8.0, "2": 5.0, "checkpoint": 0.5}}
    },
    **{
        f"other_memory_pp_{place}_sp": {"64": {"model_states": {"1": 6.0, "2": 4.0}, "activation": {"1": 2.0}}}
        for place in ("off", "on_first", "on_last")
    },
}
HARDWARE: dict[str, Data] = {
    "allreduce_bandwidth_1nodes_4gpus_per_node": {
        "allreduce_size_4_consec_1": 100.0,
        "allreduce_size_2_consec_1": 100.0,
        "allreduce_size_2_consec_0": 50.0,
    },
    "p2p_bandwidth_1nodes_4gpus_per_node": {"pp_size_2": 64.0, "pp_size_4": 32.0},
    "sp_time_1nodes_4gpus_per_node": {
        "allreduce_size_2_1MB_time": 0.1,
        "allreduce_size_2_32MB_time": 0.4,
        "allreduce_size_4_1MB_time": 0.2,
        "allreduce_size_4_32MB_time": 0.6,
        "all2all_size_4_32MB_time": 0.3,
    },
    "overlap_coefficient": {"overlap_coe": 1.25},
}
ARTEFACT: Data = {
    "_note": "words",
    "bert": {
        "comm_coe_dict_ms_per_MB_by_pp": {"1": {"4": 0.2, "2_0": 0.25, "2_1": 0.3, "1": 0}, "2": {"2": 0.2}},
        "layers": [
            {
                "name": "encoder", "parameter_size_MB_fp32": 4.0, "forward_ms_per_layer_per_sample": 2.0,
                "tp_activation_MB_per_sample": {"1": 8.0, "2": 5.0}, "other_model_states_MB": 16.0,
                "other_activation_MB_per_sample": 3.0, "sequence_length": 64, "hidden_size": 32, "bct_fct_coe": 2,
                "extra_overhead_ms_whole_model": 10.0, "dp_overlap_coe": 1.3, "bct_overlap_coe": 1.3,
            }
        ],
        "layer_num": 12,
        "bsz_range": "range(8, 256, 8)",
        "mem_list_GB": [8, 12],
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a whole set, as the profilers lay it out."""
    root = tmp_path / "theirs"
    write(root / "models/llama/configs/computation_profiling_bf16_tiny_all.json", COMPUTATION)
    write(root / "models/llama/configs/memory_profiling_bf16_tiny_all.json", MEMORY)
    write(root / "models/llama/meta_configs/tiny.json", META)
    for name, data in HARDWARE.items():
        write(root / f"hardware_configs/{name}.json", data)
    return root


def write(path: Path, data: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_whole_set_is_read_in_bytes_and_seconds(folder: Path):
    found = read_galvatron([folder])
    assert found.is_complete, found.missing
    assert (found.name, found.precision) == ("tiny", "bf16")
    layer = next(t for t in found.times if t.layer_type == 0 and t.batch == 2)
    assert (layer.seconds_per_sample, layer.seq_lens) == (2e-3, (64,))
    assert found.layers[0].parameter_bytes == 3 * MiB
    assert found.layers[0].activation_bytes == {1: 8 * MiB, 2: 5 * MiB}
    assert found.layers[0].recompute_bytes == MiB / 2
    assert found.layers[0].sequence_parallel
    assert {other.place for other in found.others} == {"alone", "first", "last"}
    assert found.others[0].states_bytes[2] == 4 * MiB
    hardware = found.hardware
    assert hardware is not None
    assert hardware.num_gpus == 4
    assert hardware.all_reduce_bytes_per_s[2, False] == 50 * MiB / 1e-3
    assert hardware.collective_s["all2all", 4, 32 * MiB] == pytest.approx(3e-4)
    assert hardware.overlap_slowdown == 1.25


def samples_of(converted: Converted, op: str, ranks: int, stride: int) -> dict[int, float]:
    found = [s for s in converted.profile.collectives if (s.op, s.num_ranks, s.stride) == (op, ranks, stride)]
    return {s.message_bytes // MiB: s.seconds for s in found}


def test_the_profile_says_what_was_measured(folder: Path):
    converted = to_profile(read_galvatron([folder]))
    assert converted.model is not None
    profile, block = converted.profile, converted.model.layers[1]
    assert isinstance(block, BlockLayer)
    assert block.mlp.ffn_size == 192, "2/3 of 4 x 64, up to a multiple of 32"
    layers = {(s.layer.kind, s.samples_per_rank): s for s in profile.layers}
    assert layers["block", 2].forward_s == pytest.approx(4e-3)
    assert layers["block", 2].backward_s == pytest.approx(8e-3)
    assert layers["block", 2].saved_bytes == 16 * MiB
    assert layers["head", 1].forward_s == pytest.approx(1.5e-3)
    assert {s.tp for s in profile.layers} == {1}, "split layers were never measured"
    assert samples_of(converted, "all_reduce", 2, 1) == pytest.approx({1: 1e-4, 32: 4e-4})
    assert samples_of(converted, "all_reduce", 2, 2) == pytest.approx({1: 2e-4, 32: 8e-4}), "times of near ones, scaled"
    assert samples_of(converted, "send", 2, 2) == pytest.approx({1: 1e-3 / 64, 32: 5e-4})
    assert samples_of(converted, "send", 2, 1)[32] == pytest.approx(1e-3)
    assert profile.overlaps[0].communication_slowdown == 1.25
    assert any("backward = 2 x forward" in line for line in converted.assumed)
    assert any("tensor parallelism" in line for line in converted.left_out)


def test_without_times_a_bandwidth_holds_for_every_size(folder: Path):
    (folder / "hardware_configs/sp_time_1nodes_4gpus_per_node.json").unlink()
    found = read_galvatron([folder])
    assert found.missing == ("sp_time_1nodes_4gpus_per_node.json: no file",)
    seconds = samples_of(to_profile(found), "all_reduce", 4, 1)
    assert seconds == pytest.approx({1: 1.5e-3 / 100, 32: 1.5 * 32e-3 / 100}), "2 (n-1)/n * bytes / bandwidth"


def test_the_profile_goes_to_a_file_and_into_a_plan(folder: Path, tmp_path: Path):
    converted = to_profile(read_galvatron([folder]))
    path = tmp_path / "profile.json"
    write_spec(converted.profile, path)
    assert read_spec(Profile, path) == converted.profile
    assert converted.model is not None
    cluster = library.cluster("4xa100-sxm-40g")
    assert fitted_cluster(cluster, converted.profile).device.layer_samples == converted.profile.layers
    found = planner.plan(converted.model, cluster, global_batch=8, seq_len=64, profile=path, time_limit_s=5)
    assert isinstance(found, Found)


def test_the_oldest_style_has_no_lengths(tmp_path: Path):
    configs = tmp_path / "gpt/configs"
    write(configs / "computation_profiling_bf16_hidden64_head4_seqlen32.json",
          {"layernum[2]_bsz4": 9.0, "layernum[4]_bsz4": 13.0, "layertype_0": 0.5})  # fmt: skip
    table = {"parameter_size": 3.0, "tp_activation_per_bsz_dict": {"1": 8.0}}
    others = {f"other_memory_pp_{p}": {"model_states": 6.0, "activation": 2.0} for p in ("off", "on_first", "on_last")}
    write(configs / "memory_profiling_bf16_hidden64_head4_seqlen32.json", {"layertype_0": table, **others})
    numbers = {"n_layer": 3, "n_embd": 64, "n_head": 4, "head_dim": 16, "vocab_size": 300, "n_positions": 32}
    write(tmp_path / "gpt/meta_configs/gpt-tiny.json", numbers)
    found = read_galvatron([tmp_path])
    assert found.seq_len == 32
    assert found.meta == numbers, "found by the shape in the name"
    assert found.others[0].states_bytes == {1: 6 * MiB}
    assert any("layertype_other" in line for line in found.missing)
    sample = to_profile(found).profile.layers[0]
    assert (sample.seq_len, sample.samples_per_rank, sample.forward_s) == (32, 1, 5e-4)
    assert sample.saved_bytes == 8 * MiB


@pytest.mark.parametrize("key", ["layernum[{}]_bsz2_seq64", "layernum{}_bsz2_seq64"])
def test_raw_runs_give_times_where_none_were_derived(tmp_path: Path, key: str):
    path = write(tmp_path / "computation_profiling_bf16_x.json", {key.format(2): 10.0, key.format(4): 16.0})
    times = {t.layer_type: t for t in read_computation(path).times}
    assert times[0].seconds_per_sample == pytest.approx(1.5e-3)
    assert times[None].seconds_per_sample == pytest.approx(2e-3)


def test_raw_runs_of_several_types(tmp_path: Path):
    keys = {"layernum[1,1]_bsz2_seq[64,32]": 10.0, "layernum[2,1]_bsz2_seq[64,32]": 14.0}
    path = write(tmp_path / "computation_profiling_bf16_x.json", {**keys, "layernum[1,2]_bsz2_seq[64,32]": 12.0})
    times = {t.layer_type: t for t in read_computation(path).times}
    assert times[0].seconds_per_sample == pytest.approx(2e-3)
    assert (times[1].seconds_per_sample, times[1].seq_lens) == (pytest.approx(1e-3), (32,))
    assert times[None].seconds_per_sample == pytest.approx(2e-3)
    joined = write(tmp_path / "y.json", {"layernum1_1_bsz2_seq64_32": 10.0, "layertype_1_bsz2_seq32": 1.0})
    assert read_computation(joined).times[0].layer_type == 1


def test_several_types_of_layers_are_no_decoder(folder: Path):
    path = folder / "models/llama/configs/computation_profiling_bf16_tiny_all.json"
    write(path, {**COMPUTATION, "layertype_1_bsz1_seq64": 3.0})
    found = read_galvatron([folder])
    assert any("layertype_1: no table" in line for line in found.missing)
    converted = to_profile(found)
    assert not converted.profile.layers
    assert converted.model is None
    assert "2 types of layers" in converted.left_out[0]


def test_times_that_are_not_above_zero_are_left_out(folder: Path):
    path = folder / "models/llama/configs/computation_profiling_bf16_tiny_all.json"
    write(path, {**COMPUTATION, "layertype_0_bsz3_seq64": -2.0, "layertype_other_bsz3_seq64": 0})
    found = read_galvatron([folder])
    assert "layertype_0_bsz3_seq64" in found.notes[0]
    assert {s.samples_per_rank for s in to_profile(found).profile.layers} == {1, 2}


def test_halves_of_layers_are_not_layers(folder: Path):
    configs = folder / "models/llama/configs"
    halves = {f"{key}_mlp": value for key, value in COMPUTATION.items()}
    write(configs / "computation_profiling_bf16_tiny_all.json", halves)
    assert any("layertype_0: no time" in line for line in read_galvatron([folder]).missing)
    for kind in ("computation", "memory"):
        (configs / f"{kind}_profiling_bf16_tiny_all.json").unlink()
        write(configs / f"{kind}_profiling_bf16_tiny_mlp.json", COMPUTATION if kind == "computation" else MEMORY)
    assert "half of a layer" in to_profile(read_galvatron([folder])).left_out[0]


def remove(pattern: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for path in root.rglob(pattern):
            path.unlink()

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove("computation_*"), "computation_profiling_bf16_tiny_all.json: no file"),
        (remove("memory_*"), "memory_profiling_bf16_tiny_all.json: no file"),
        (remove("tiny.json"), "meta_configs: no file for tiny"),
        (remove("allreduce_*"), "allreduce_bandwidth_1nodes_4gpus_per_node.json: no file"),
        (remove("p2p_*"), "p2p_bandwidth_1nodes_4gpus_per_node.json: no file"),
        (remove("sp_time_*"), "sp_time_1nodes_4gpus_per_node.json: no file"),
        (remove("overlap_*"), "overlap_coefficient.json: no file"),
    ],
)
def test_what_is_missing_is_named(folder: Path, change: Callable[[Path], None], says: str):
    change(folder)
    found = read_galvatron([folder])
    assert found.missing == (says,)
    assert not found.is_complete


@pytest.mark.parametrize(
    ("name", "key", "says"),
    [
        ("memory_profiling_bf16_tiny_all", "layertype_0_sp", "layertype_0: no table, only raw runs"),
        ("memory_profiling_bf16_tiny_all", "other_memory_pp_on_last_sp", "other_memory_pp_on_last: no table"),
        ("allreduce_bandwidth_1nodes_4gpus_per_node", "allreduce_size_2_consec_0", "allreduce_size_2_consec_0: no"),
    ],
)
def test_missing_keys_are_named(folder: Path, name: str, key: str, says: str):
    path = next(folder.rglob(f"{name}.json"))
    data = json.loads(path.read_text())
    del data[key]
    write(path, data)
    missing = read_galvatron([folder]).missing
    assert len(missing) == 1
    assert f"{path.name}: {says}" in missing[0]


BROKEN: list[tuple[str, object, str]] = [
    ("computation_profiling_bf16_tiny_all", "{", "not readable as JSON"),
    ("computation_profiling_bf16_tiny_all", [1], "must hold one JSON object, not a list"),
    (
        "computation_profiling_bf16_tiny_all",
        {"layertype_0_bsz1_seq64": "fast"},
        "layertype_0_bsz1_seq64: must be a number",
    ),
    ("computation_profiling_bf16_tiny_all", '{"layertype_0_bsz1_seq64": NaN}', "must be a finite number"),
    ("computation_profiling_bf16_tiny_all", {"layertype_0_bsz1_seq64": 1e300}, "must be a finite number"),
    ("computation_profiling_bf16_tiny_all", {"layertype_0_bsz1_seq64": True}, "must be a number, not True"),
    ("computation_profiling_bf16_tiny_all", {"layertype_zero": 1.0}, "'layertype_zero': the key is not understood"),
    ("computation_profiling_bf16_tiny_all", {"layertype_0_bsz0_seq64": 1.0}, "is not a number that a key may have"),
    ("computation_profiling_bf16_tiny_all", {f"layertype_0_bsz{'9' * 40}": 1.0}, "is not a number that a key may have"),
    ("memory_profiling_bf16_tiny_all", {"layertype_0": 3}, "layertype_0: must be an object, not 3"),
    ("memory_profiling_bf16_tiny_all", {"layertype_0": {}}, "layertype_0: parameter_size: required, but missing"),
    ("memory_profiling_bf16_tiny_all", {"layertype_0": {"64": 1}}, "layertype_0: 64: must be an object"),
    ("memory_profiling_bf16_tiny_all", {"layertype_0": {"long": {}}}, "layertype_0: long: must be a length"),
    (
        "memory_profiling_bf16_tiny_all",
        {"layertype_0": {"parameter_size": 1.0}},
        "tp_activation_per_bsz_dict: must be an",
    ),
    (
        "memory_profiling_bf16_tiny_all",
        {"layertype_0": {"parameter_size": -1.0, "tp_activation_per_bsz_dict": {"1": 1.0}}},
        "parameter_size: must not be below 0",
    ),
    (
        "memory_profiling_bf16_tiny_all",
        {"layertype_0": {"parameter_size": 1.0, "tp_activation_per_bsz_dict": {"two": 1.0}}},
        "'two' is not a degree",
    ),
    ("memory_profiling_bf16_tiny_all", {"other_memory_pp_off": {"model_states": {"1": 1.0}}}, "activation: must be an"),
    ("allreduce_bandwidth_1nodes_4gpus_per_node", {"allreduce_size_0_consec_1": 1.0}, "unknown key; they are such as"),
    ("allreduce_bandwidth_1nodes_4gpus_per_node", {"allreduce_size_4_consec_1": 0}, "must be above 0"),
    ("p2p_bandwidth_1nodes_4gpus_per_node", {}, "holds no key such as pp_size_2"),
    ("sp_time_1nodes_4gpus_per_node", {"allreduce_size_4_1MB_time": None}, "must be a number, not missing"),
    ("overlap_coefficient", {"coefficient": 1.2}, "overlap_coe: required, but missing"),
    ("overlap_coefficient", {"overlap_coe": 0.5}, "overlap_coe: must be a factor of at least 1"),
    ("tiny", {**META, "dim": "wide"}, "dim: must be a positive whole number, not 'wide'"),
    ("tiny", {"dim": 64, "n_heads": 4}, "multiple_of: must be a positive whole number, not missing"),
]


@pytest.mark.parametrize(("name", "content", "says"), BROKEN)
def test_a_broken_file_is_one_line_that_names_it(folder: Path, name: str, content: object, says: str):
    path = write(next(folder.rglob(f"{name}.json")), content)
    with pytest.raises(UserError, match="json") as caught:
        to_profile(read_galvatron([folder]))
    line = str(caught.value)
    assert says in line
    assert str(path) in line
    assert "\n" not in line


def test_the_one_that_is_meant(folder: Path):
    configs = folder / "models/llama/configs"
    for kind, data in (("computation", COMPUTATION), ("memory", MEMORY)):
        write(configs / f"{kind}_profiling_bf16_other.json", data)
    assert set_names([folder]) == ("models/llama/other", "models/llama/tiny")
    with pytest.raises(
        UserError, match=r"several sets; choose one with --model.*: models/llama/other, models/llama/tiny"
    ):
        read_galvatron([folder])
    assert read_galvatron([folder], model="tiny").name == "tiny"
    assert read_galvatron([folder], model="llama/other").name == "other"
    with pytest.raises(UserError, match="no set called 'big'; there are: models/llama/other"):
        read_galvatron([folder], model="big")
    write(folder / "hardware_configs/p2p_bandwidth_2nodes_4gpus_per_node.json", {"pp_size_2": 5.0})
    found = read_galvatron([folder], model="tiny", hardware="2x4")
    assert found.hardware is not None
    assert found.hardware.num_gpus == 8
    with pytest.raises(UserError, match=r"no cluster '3x3'.*there are: 1x4, 2x4"):
        read_galvatron([folder], model="tiny", hardware="3x3")


def test_versions_kept_aside(folder: Path):
    configs = folder / "models/llama/configs"
    (configs / "computation_profiling_bf16_tiny_all.json").rename(
        configs / "computation_profiling_bf16_tiny_all@1a.json"
    )
    assert read_galvatron([folder]).is_complete
    write(configs / "computation_profiling_bf16_tiny_all@2b.json", COMPUTATION)
    with pytest.raises(UserError, match=r"there are several versions, .*@1a.json, .*@2b.json"):
        read_galvatron([folder])
    paths = [configs / "computation_profiling_bf16_tiny_all@2b.json", configs / "memory_profiling_bf16_tiny_all.json"]
    assert read_galvatron(paths).times


def test_files_that_are_called_otherwise(tmp_path: Path):
    """By what they hold."""
    contents = {"a": COMPUTATION, "b": MEMORY, "c": META, **{f"h{i}": h for i, h in enumerate(HARDWARE.values())}}
    found = read_galvatron([write(tmp_path / f"{name}.json", data) for name, data in contents.items()])
    assert found.is_complete, found.missing
    assert found.hardware is not None
    assert found.hardware.num_gpus == 4
    with pytest.raises(UserError, match=r"z.json: is no profile of Galvatron"):
        read_galvatron([write(tmp_path / "z.json", {"some": 1})])
    with pytest.raises(UserError, match="no such file"):
        read_galvatron([tmp_path / "nothing.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no profile of Galvatron"):
        read_galvatron([tmp_path / "empty"])


def test_the_model_may_be_named(folder: Path):
    remove("tiny.json")(folder)
    with pytest.raises(UserError, match="say which it is with --model-spec"):
        to_profile(read_galvatron([folder]))
    model = library.model("tiny-llama")
    converted = to_profile(read_galvatron([folder]), model)
    assert converted.model == model
    assert {type(s.layer) for s in converted.profile.layers} == {BlockLayer, HeadLayer}


def test_models_of_other_numbers():
    assert model_from_meta({**META, "ffn_dim": 160}, name="x", where="x.json").num_blocks == 3
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    assert model_from_meta(config, name="x", where="x.json").family == "gpt2"
    with pytest.raises(UserError, match="neither numbers of a Llama"):
        model_from_meta({"hidden_size": 3}, name="x", where="x.json")


def test_the_constants_of_2022(tmp_path: Path):
    path = write(tmp_path / "profile_constants.json", ARTEFACT)
    found = read_galvatron([path])
    artefact = found.artefact
    assert artefact is not None
    assert (found.name, artefact.layers[0].count, artefact.layers[0].forward_s) == ("vldb22/bert", 12, 2e-3)
    assert artefact.seconds_per_byte[1][2, True] == pytest.approx(0.3e-3 / MiB)
    assert artefact.seconds_per_byte[1][4, None] == pytest.approx(0.2e-3 / MiB)
    assert artefact.batches == range(8, 256, 8)
    assert found.hardware is not None
    assert found.hardware.all_reduce_bytes_per_s[2, False] == pytest.approx(MiB / 0.25e-3)
    converted = to_profile(found)
    assert "not decoder-only" in converted.left_out[0]
    assert converted.profile.collectives


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda bert: bert.pop("layers"), "bert: layers: must be a list"),
        (lambda bert: bert.update(layer_num=[1, 2]), "bert: layer_num: must have one number"),
        (lambda bert: bert.update(bsz_range="all"), "bert: bsz_range: must be such as"),
        (lambda bert: bert.update(mem_list_GB=8), "bert: mem_list_GB: must be a list"),
        (lambda bert: bert["layers"][0].pop("hidden_size"), "layers[0]: hidden_size: must be a number, not missing"),
        (lambda bert: bert["comm_coe_dict_ms_per_MB_by_pp"].pop("1"), "1: required, but missing"),
        (lambda bert: bert["comm_coe_dict_ms_per_MB_by_pp"]["1"].update(x=1), "'x' is not a group"),
    ],
)
def test_broken_constants_of_2022(tmp_path: Path, change: Callable[[Data], object], says: str):
    data = json.loads(json.dumps(ARTEFACT))
    change(data["bert"])
    path = write(tmp_path / "profile_constants.json", data)
    with pytest.raises(UserError) as caught:
        read_galvatron([path])
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_command(run: Run, folder: Path, tmp_path: Path):  # noqa: F811 a fixture
    output, model = tmp_path / "profile.json", tmp_path / "model.json"
    code, out, err = run("import", "galvatron", str(folder), "-o", str(output), "--model-output", str(model))
    assert code == 0, err
    assert str(output) in err
    for part in ("tiny, bf16, 1 x 4 GPUs", "taken", "assumed", "left out", "backward = 2 x forward"):
        assert part in out
    assert read_spec(Profile, output).layers
    assert library.model(str(model)).num_blocks == 3
    code, out, _ = run("import", "galvatron", str(folder), "-o", str(output), "--json")
    assert json.loads(out)["missing"] == []
    for arguments in ([str(tmp_path / "no")], [str(folder), "--model", "x"], [str(folder), "--hardware", "9x9"]):
        code, out, err = run("import", "galvatron", *arguments, "-o", str(tmp_path / "not.json"))
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert not (tmp_path / "not.json").exists()


# What was published.


def published() -> list[str]:
    return list(set_names([PUBLISHED])) if PUBLISHED.is_dir() else []


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published profiles are not there")
@pytest.mark.parametrize("name", published())
def test_every_published_set(name: str, tmp_path: Path):
    found = read_published(name)
    if found is None:
        return
    assert found.files
    assert all(": " in line for line in found.missing)
    model = None
    if found.meta is None and found.times and found.artefact is None:
        assert not found.is_complete
        model = library.model("llama-2-7b")
    converted = to_profile(found, model)
    check(found, converted)
    write_spec(converted.profile, tmp_path / "profile.json")
    assert read_spec(Profile, tmp_path / "profile.json") == converted.profile


def read_published(name: str) -> GalvatronProfile | None:
    """Return a set; None where there are several versions of its files, between which only the user can choose."""
    try:
        return read_galvatron([PUBLISHED], model=name)
    except UserError as error:
        if "several versions" not in str(error):
            raise
        return None


def check(found: GalvatronProfile, converted: Converted) -> None:
    """A whole set of a decoder has samples of blocks, and its cheapest sample is its own time."""
    profile = converted.profile
    if found.is_complete and converted.model is not None:
        assert profile.layers
        assert profile.collectives
        assert profile.overlaps
    blocks = [s for s in profile.layers if isinstance(s.layer, BlockLayer)]
    if blocks:
        own = min(t.seconds_per_sample for t in found.times if t.layer_type == 0 and t.seconds_per_sample > 0)
        assert math.isclose(min(s.forward_s / s.samples_per_rank for s in blocks), own, rel_tol=0.5)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published profiles are not there")
def test_whole_sets_are_among_the_published_ones():
    whole = [
        name for name in published() if name.startswith("old/") and read_galvatron([PUBLISHED], model=name).is_complete
    ]
    assert len(whole) >= 8


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published profiles are not there")
def test_memory_tables_of_several_lengths():
    path = next((PUBLISHED / "old").rglob("memory_profiling_bf16_hidden768_head12.json"))
    assert len({layer.seq_len for layer in read_memory(path).layers}) > 1
