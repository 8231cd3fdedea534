"""Files: round trips, canonical form, and one line for whatever is wrong with one."""

from __future__ import annotations

import pytest

from meshwright.errors import UserError
from meshwright.files import canonical_json, from_data, read_data, read_spec, read_text, sha256, write_spec, write_text
from meshwright.spec.base import NonNegativeFloat, Spec
from meshwright.spec.job import Budget, JobSpec
from meshwright.spec.library import cluster, device_names, model, model_names
from meshwright.spec.strategy import Strategy


class Point(Spec):
    x: NonNegativeFloat
    names: tuple[str, ...] = ()


@pytest.mark.parametrize("ending", ["json", "yaml", "yml"])
def test_round_trips(tmp_path, ending: str):
    values = [JobSpec(global_batch_size="auto", seq_len=8), Point(x=1e-12, names=("1e3", "-2.E+4", "1e", "no", "null"))]
    values += [model(name) for name in model_names()] + [cluster(f"2x8x{name}") for name in device_names()]
    for value in values:
        write_spec(value, tmp_path / f"value.{ending}")
        assert read_spec(type(value), tmp_path / f"value.{ending}") == value


def test_equal_values_are_equal_bytes():
    written = canonical_json(Strategy(tp=2, dp_replicate=4))
    assert written == canonical_json(from_data(Strategy, {"dp_replicate": 4, "tp": 2}, where=""))
    assert written.endswith("}\n")
    assert sha256(Strategy(tp=2)) == sha256(Strategy(tp=2)) != sha256(Strategy(tp=4))
    assert sha256(None, Strategy()) != sha256(Strategy())


@pytest.mark.parametrize(("text", "number"), [("3e-4", 3e-4), ("312e12", 312e12), ("1.5E+9", 1.5e9), ("7", 7)])
def test_yaml_numbers_as_people_write_them(tmp_path, text: str, number: float):
    (tmp_path / "point.yaml").write_text(f"x: {text}\nnames: ['{text}']\n")
    assert read_spec(Point, tmp_path / "point.yaml") == Point(x=number, names=(text,))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", r"a\.json: not readable as JSON: Expecting property name"),
        ("a.yaml", "x: [", r"a\.yaml: not readable as YAML: "),
        ("a.json", '{"x": 1, "y": 2}', r"a\.json: y: unknown key"),
        ("a.json", "{}", r"a\.json: x: required, but missing"),
        ("a.json", "[]", r"a\.json: "),
        ("a.json", "null", r"a\.json: "),
        ("a.json", '{"x": "1"}', r"a\.json: x: .*number, not '1'"),
        ("a.json", '{"x": -1}', r"a\.json: x: .*greater than or equal to 0, not -1"),
        ("a.json", '{"x": NaN}', r"a\.json: x: .*finite number, not nan"),
        ("a.yaml", "x: .inf", r"a\.yaml: x: .*finite number, not inf"),
        ("a.json", '{"x": 1, "names": [2]}', r"a\.json: names\[0\]: .*string, not 2"),
        ("a.json", '{"x": "1", "names": 3}', r"\(and 1 more\)"),
        ("a.yaml", "x: 2026-01-01", r"a\.yaml: "),
        ("a.json", '{"x": "' + "y" * 500 + '"}', r"not 'yyy.*\.\.\."),
        ("a.json", "[" * 100_000, r"a\.json: not readable as JSON"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, name: str, text: str, message: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_spec(Point, name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_data(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe caf\xe9")
    with pytest.raises(UserError, match="not a UTF-8 text file"):
        read_text(tmp_path / "latin")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(UserError, match=r"file\.txt.*cannot be written"):
        write_text(path / "below", "x")
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        write_text(path.parent, "x")
    assert list(tmp_path.iterdir()) == [path.parent]


def test_a_bad_value_in_code_raises_too():
    with pytest.raises(ValueError, match="leaves nothing"):
        Budget(memory_bytes=10, reserved_bytes=10)
