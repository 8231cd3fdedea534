"""The benchmark scripts import each other by plain names, as scripts do; so do these tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
