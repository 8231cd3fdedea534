"""Files: round trips, canonical form, and one line for whatever is wrong with one."""

from __future__ import annotations

import pytest

from meshwright.errors import UserError
from meshwright.files import (
    canonical_json,
    check_writable,
    from_data,
    read_data,
    read_lines,
    read_spec,
    read_text,
    sha256,
    write_spec,
    write_text,
)
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
        ("a.json", "[1]", r"a\.json: must be an object, not a list"),
        ("a.json", '{"x": 1, "x": 2}', r"a\.json: not readable as JSON: key 'x' is there twice"),
        ("a.json", '{"x": 1e400}', r"a\.json: x: must be a finite number, not inf"),
        ("a.yaml", "x: 1\nx: 2", r"a\.yaml: not readable as YAML: line 2, column 1: key 'x' is there twice"),
        ("a.yaml", "x: &a 1\nnames: [*a]", r"line 2, column 9: an alias is not supported; write it out"),
        ("a.yaml", "x: !!python/name:os.system", r"could not determine a constructor for the tag"),
        ("a.yaml", "x: !!binary aGVsbG8=", r"a\.yaml: holds more than text, numbers, lists and objects"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, name: str, text: str, message: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_spec(Point, name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_keys_of_another_kind_of_file_are_named(tmp_path):
    write_spec(Strategy(), tmp_path / "strategy.json")
    message = r"strategy\.json: is another kind of file: it has none of the keys global_batch_size, seq_len"
    with pytest.raises(UserError, match=message):
        read_spec(JobSpec, tmp_path / "strategy.json")


def test_a_byte_order_mark_and_a_date_are_read(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"x": 1}')
    assert read_spec(Point, tmp_path / "a.json") == Point(x=1)
    (tmp_path / "a.yaml").write_text("x: 1\nnames: [2026-01-01]")
    assert read_spec(Point, tmp_path / "a.yaml") == Point(x=1, names=("2026-01-01",))


def test_names_that_pydantic_gives_to_choices_are_left_out():
    with pytest.raises(UserError, match=r"job: global_batch_size: must be greater than or equal to 1, not 0"):
        from_data(JobSpec, {"global_batch_size": 0, "seq_len": 8}, where="job")
    with pytest.raises(UserError, match=r"job: Sequence-Length: unknown key"):
        from_data(JobSpec, {"global_batch_size": 1, "seq_len": 8, "Sequence-Length": 8}, where="job")


def test_lines_of_json_are_read_one_by_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    assert read_lines(tmp_path / "a.jsonl") == [{"a": 1}, {"a": 2}]
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": ')
    with pytest.raises(UserError, match=r"a\.jsonl: line 2: not readable as JSON"):
        read_lines(tmp_path / "a.jsonl")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="is a device, not a file"):
        read_text("/dev/zero")
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


def test_a_read_only_file_is_not_replaced(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("mine")
    path.chmod(0o444)
    with pytest.raises(UserError, match=r"file\.txt: cannot be written: it is marked read-only"):
        write_text(path, "new")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("new.json", None),
        ("deep/er/new.json", None),
        ("old.txt", None),
        ("folder", "Is a directory"),
        ("old.txt/new.json", "Not a directory"),
        ("y" * 5000, "File name too long"),
        ("/proc/nowhere/new.json", "cannot be written"),
    ],
)
def test_whether_a_file_can_be_written_is_known_before(tmp_path, name: str, message: str | None):
    (tmp_path / "folder").mkdir()
    (tmp_path / "old.txt").write_text("old")
    if message is None:
        check_writable(tmp_path / name)
    else:
        with pytest.raises(UserError, match=message):
            check_writable(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "old.txt"]
    assert (tmp_path / "old.txt").read_text() == "old"


def test_a_bad_value_in_code_raises_too():
    with pytest.raises(ValueError, match="leaves nothing"):
        Budget(memory_bytes=10, reserved_bytes=10)
