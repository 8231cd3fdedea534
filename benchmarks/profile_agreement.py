"""Does a second profile of this machine agree with the first within the spread that both state?

    python benchmarks/profile_agreement.py [--ranks 4] [--json OUT]

Two samples of the same thing agree when their intervals, figure * (1 +- spread), meet.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from cpu_plans import Setup

import meshwright
from meshwright.files import read_spec
from meshwright.spec.profile import SAMPLE_FIELDS, Sample

_COUNTED = ("saved_bytes", "transient_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", default="demo-llama")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    profiles: list[meshwright.Profile] = []
    taken_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            setup = Setup(
                model=options.model,
                batch=options.batch,
                seq_len=options.seq_len,
                num_ranks=options.ranks,
                profile=Path(folder) / f"profile-{number}.json",
            )
            taken_s.append(setup.measure_profile())
            profiles.append(read_spec(meshwright.Profile, setup.profile))
    print(f"profiles of {options.ranks} ranks took {taken_s[0]:.0f} s and {taken_s[1]:.0f} s")
    results = {name: agreement(*(getattr(profile, name) for profile in profiles)) for name in SAMPLE_FIELDS}
    for name, one in results.items():
        if one["num_figures"]:
            print(
                f"{name:14} {one['num_agree']} of {one['num_figures']} figures agree; differences: median "
                f"{one['median_difference']:.1%}, median of the stated spread {one['median_spread']:.1%}"
            )
    agree, figures = (sum(one[name] for one in results.values()) for name in ("num_agree", "num_figures"))
    print(f"all: {agree} of {figures} ({agree / figures:.0%})")
    if options.json is not None:
        options.json.write_text(json.dumps({"seconds": taken_s, "kinds": results}, indent=2))


def agreement(first: tuple[Sample, ...], second: tuple[Sample, ...]) -> dict[str, Any]:
    other = {sample.key: sample for sample in second}
    differences: list[float] = []
    agree = 0
    for mine in first:
        theirs = other[mine.key]
        for name in mine.FIGURES - {"spread", "repeats", *_COUNTED}:
            one, two = getattr(mine, name), getattr(theirs, name)
            differences.append(abs(two / one - 1))
            agree += abs(two - one) <= one * mine.spread + two * theirs.spread
    return {
        "num_figures": len(differences),
        "num_agree": agree,
        "median_difference": median(differences or [0.0]),
        "median_spread": median([sample.spread for sample in (*first, *second)] or [0.0]),
    }


if __name__ == "__main__":
    main()
