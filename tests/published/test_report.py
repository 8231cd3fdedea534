"""The report over a small file: all parts are there, filters choose, and the plan order is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import published
import pytest
from published_pricing import matches, price
from published_records import record_of

from meshwright.errors import UserError
from tests.published.rows import row


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        row(id=f"tp{tp}", parallel={"tp": tp, "dp": None}, norm={"iter_time_s": time_s})
        for tp, time_s in ((2, 10.0), (4, 11.0), (8, 12.0))
    ]
    rows.append(row(id="oom", measured={"oom": True}, batch={"mbs": 32}, recompute="none"))
    rows.append(row(id="unknown", model={"heads": None}))
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    (tmp_path / "ranking_sets.json").write_text(json.dumps([{"gpu": "A100-80", "ids": ["tp2", "tp4", "tp8"]}]))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str):
    monkeypatch.setattr(sys, "argv", ["published.py", *arguments])
    published.main()


def test_report(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    out = data.with_name("out.json")
    run(monkeypatch, "--data", str(data), "--json", str(out))
    report = json.loads(out.read_text())
    assert report["groups"]["made-up"]["skipped"] == {"model.heads": 1}
    assert report["time"]["dense"]["all"]["num"] == 3
    assert report["fit"]["num_oom"] == 1
    assert report["order"]["time_s"]["num_sets"] == 1
    assert [one["id"] for one in report["records"]] == ["tp2", "tp4", "tp8", "oom", "unknown"]
    printed = capsys.readouterr().out
    assert "skipped 1: model.heads" in printed
    assert "pairs > 5 % apart" in printed


def test_report_of_a_filter(data: Path, monkeypatch: pytest.MonkeyPatch):
    out = data.with_name("out.json")
    run(monkeypatch, "--data", str(data), "--json", str(out), "--filter", "dense", "--filter", "!id=tp8")
    assert [one["id"] for one in json.loads(out.read_text())["records"]] == ["tp2", "tp4", "oom", "unknown"]


def test_filters():
    record = record_of(row())
    assert matches(record, "gpu=A100*")
    assert matches(record, "framework=megatron")
    assert not matches(record, "!dense")
    with pytest.raises(UserError, match="--filter size=3: not one of base, dense"):
        matches(record, "size=3")


def test_a_record_without_a_run_is_not_priced():
    priced = price(record_of(row(model={"heads": None})))
    assert (priced.time_s, priced.memory_bytes, priced.problem) == (None, None, "model.heads")
