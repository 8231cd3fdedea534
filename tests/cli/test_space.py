"""meshwright space: trees, counts, reasons, and bad input in one line."""

from __future__ import annotations

import json

import pytest

from meshwright.search.space import SPACES, strategies
from meshwright.search.tree import RULES
from tests.cli.conftest import Run


def rows_of(text: str, first: str) -> list[list[str]]:
    """Return the cells of the rows below the line that starts with `first`, until a line is not a row of numbers."""
    lines = iter(text.splitlines())
    next(line for line in lines if line.startswith(first))
    rows: list[list[str]] = []
    for line in lines:
        cells = line.split()
        if not all(cell.isdigit() for cell in cells[1:]):
            break
        rows.append(cells)
    return rows


def test_trees_and_counts(run: Run):
    code, out, err = run("space", "8", "--space", "bmw")
    assert (code, err) == (0, "")
    for part in (
        "1 stage of 8 devices",
        "8 stages of 1 device",
        "sharded dp 8: zero2x8, zero3x8",
        "dropped by T3: dp 2 with sharded dp 2; sharded dp 4 is tried instead",
        "arXiv 2307.02031, takeaway 3",
    ):
        assert part in out
    assert rows_of(out, "stages") == [
        ["1", "8", "21", "10", "11", "16", "32"],
        ["2", "4", "9", "2", "7", "10", "20"],
        ["4", "2", "3", "0", "3", "4", "8"],
        ["8", "1", "1", "0", "1", "1", "2"],
        ["all", "34", "12", "22", "31", "62"],
    ]


def test_every_path_is_a_line_of_a_tree(run: Run):
    _, out, _ = run("space", "8")
    tree = out[: out.index("space full")].splitlines()
    leaves = [line for line in tree if ": " in line or line.endswith("single")]
    assert len(leaves) == 34
    assert sum("dropped by M1" in line for line in leaves) == 7


def test_counts_alone(run: Run):
    code, out, _ = run("space", "8", "--counts")
    assert code == 0
    assert "1 stage of" not in out
    assert out.startswith("space full")


def test_t3_is_switched(run: Run):
    for options in (["--space", "bmw", "--without", "T3"], ["--space", "full"]):
        _, out, _ = run("space", "8", "--counts", *options)
        assert rows_of(out, "stages")[-1] == ["all", "34", "7", "27", "41", "82"]
    _, out, _ = run("space", "8", "--counts", "--with", "T3")
    assert out.startswith("space full with T3")
    assert rows_of(out, "stages")[-1] == ["all", "34", "12", "22", "31", "62"]


def test_what_t1_and_t2_drop_is_listed_and_said_not_to_be_searched(run: Run):
    _, out, _ = run("space", "8", "--without", "T1")
    assert "dropped by T1: pp lies below dp 2, but stages are cut first" in out
    assert rows_of(out, "stages") == [["any", "52", "18", "7", "27", "41", "82"]]
    assert "T1 is listed, not searched: a plan's stages are cut first" in out
    _, out, _ = run("space", "8", "--without", "T2")
    assert "dp 3: dropped by T2: 8 devices cannot be split into 3 equal parts" in out
    assert rows_of(out, "stages")[-1] == ["all", "55", "21", "7", "27", "41", "82"]
    assert "T2 is listed, not searched" in out


def test_a_model_shows_what_its_layers_cannot_use(run: Run):
    code, out, err = run("space", "8", "--counts", "--model", "tiny-llama", "--micro-batch", "2")
    assert (code, err) == (0, "")
    for part in (
        "4 x block",
        "tp 4 does not divide num_kv_heads=2; allowed: 1, 2",
        "dp 4 does not divide the micro-batch of 2 samples",
        "recomputing an embedding cannot help",
        "8 stages are not tried: 8 stages need as many layers, but tiny-llama has 6",
    ):
        assert part in out
    _, out, _ = run("space", "4", "--counts", "--model", "tiny-llama", "--micro-batch", "8", "--schedule", "gpipe")
    assert "recomputing a head" not in out
    _, out, _ = run("space", "6", "--counts", "--space", "base", "--model", "tiny-llama", "--micro-batch", "8")
    assert "6 stages are not tried: 6 even stages need as many blocks, but tiny-llama has 4" in out


def test_json_says_the_same(run: Run):
    code, out, err = run("space", "8", "--json", "--model", "gpt2", "--micro-batch", "16")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert [len(tree["paths"]) for tree in data["trees"]] == [21, 9, 3, 1]
    for tree, legal in zip(data["trees"], data["model"], strict=True):
        kept = [label for path in tree["paths"] for label in path.get("strategies", [])]
        assert sorted(kept) == sorted(strategy.label for strategy in strategies(SPACES["full"], tree["devices"]))
        assert tree["counts"]["with_recomputation"] == len(kept)
        assert all(path["reason"] for path in tree["paths"] if "dropped_by" in path)
        for layer in legal["layers"]:
            assert sorted([*layer["allowed"], *(drop["strategy"] for drop in layer["dropped"])]) == sorted(kept)
            assert all(drop["rule"] and drop["reason"] for drop in layer["dropped"])
    _, out, _ = run("space", "8", "--json", "--counts")
    assert all("paths" not in tree for tree in json.loads(out)["trees"])


def test_the_list_shows_every_space(run: Run):
    code, out, err = run("space", "--list")
    assert (code, err) == (0, "")
    for name, space in SPACES.items():
        assert any(line.startswith(name) and space.about in line for line in out.splitlines())
    _, out, _ = run("space", "--list", "--json")
    listed = {entry["name"]: entry for entry in json.loads(out)["spaces"]}
    assert {rule["name"] for rule in json.loads(out)["rules"]} == {*RULES}
    assert list(listed) == list(SPACES)
    assert listed["bmw"]["rules"] == ["T1", "T2", "T3"]
    assert (listed["bmw"]["partition"], listed["base"]["partition"]) == ("bmw", "even")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "space: give the number of devices, such as 8, or --list for the names of the spaces"),
        (["8", "--list"], "space: --list shows all spaces; leave out the devices and --model"),
        (["8", "--space", "best"], "space: 'best' is not known; choose one of full, base"),
        (["8", "--without", "T9"], "rule: 'T9' is not known; T3 can be switched on or off"),
        (["8", "--without", "M1"], "rule: M1 cannot be switched: the runtime builds no other mesh; only T3 can"),
        (["8", "--with", "T1"], "rule: T1 cannot be switched"),
        (["8", "--with", "T3", "--without", "T3"], "rule: T3 is given to both --with and --without; leave out one"),
        (["8", "--space", "3d", "--with", "T3"], "space 3d does not have both; use space full, base or bmw"),
        (["8", "--space", "ddp", "--without", "T1"], "rule: T1 has nothing to drop in space ddp, whose stages are"),
        (["6", "--space", "deepspeed-3d"], "6 devices do not allow; give a multiple of 4"),
        (["8", "--model", "gpt2"], "micro-batch: --model and --micro-batch go together"),
        (["8", "--micro-batch", "4"], "micro-batch: --model and --micro-batch go together"),
        (["8", "--model", "gpt9", "--micro-batch", "4"], "model: "),
    ],
)
def test_bad_input_is_one_line(run: Run, options: list[str], says: str):
    code, out, err = run("space", *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("devices", ["0", "-1", "eight", "16385"])
def test_devices_are_a_count(run: Run, devices: str):
    code, out, err = run("space", "--", devices)
    assert (code, out) == (2, "")
    assert err.startswith("error: meshwright space: invalid value for 'devices'")
