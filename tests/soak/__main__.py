"""Run random trials until the time is over; the exit status is 1 if one of them failed.

PYTHONPATH=tests python -m soak --minutes 30 --seed 1000
PYTHONPATH=tests python -m soak --trials 1 --seed 1017    # one trial again
"""

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from soak.oracle import complaints, needs_reference
from soak.ranks import run
from soak.trial import Fault, draw

_NOTHING = Fault("none", 0, 0, "loader")
_MEMBERS = 0.1 if importlib.util.find_spec("torchft") else 0.0
"""The share of trials in which a replica group leaves and returns."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--trials", type=int, help="number of trials, instead of a time")
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    importlib.import_module("torch._dynamo")  # the first forward of a wrapper imports it
    end = time.monotonic() + 60 * given.minutes
    count, failed, kinds = 0, [], Counter[str]()
    while count < given.trials if given.trials is not None else time.monotonic() < end:
        seed = given.seed + count
        count += 1
        kind, found = _try(seed)
        kinds[kind] += 1
        if found:
            failed.append(seed)
            print(f"\nFAILED {seed}, {kind}", *found, sep="\n", flush=True)
    print(f"\n{count} trials, {len(failed)} failed: {failed}")
    print(", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    return 1 if failed else 0


def _try(seed: int) -> tuple[str, list[str]]:
    """Run the trial of this seed; return its kind and what was wrong."""
    if random.Random(f"members {seed}").random() < _MEMBERS:
        command = [sys.executable, "-m", "soak.members", str(seed)]
        ended = subprocess.run(command, capture_output=True, check=False, text=True)
        return "members", [ended.stdout, ended.stderr] if ended.returncode else []
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        trial = draw(seed)
        reference = None
        if needs_reference(trial):
            plain = folder / "reference"
            plain.mkdir()
            reference = run(replace(trial, fault=_NOTHING, checkpoint=None), plain)
        ends = run(trial, folder)
        found = list(complaints(trial, ends, reference))
        if trial.checkpoint and not found:
            ends = run(trial, folder, first=trial.checkpoint)
            found = list(complaints(trial, ends, reference))
        if found:
            found.insert(0, str(trial))
        return trial.fault.kind if trial.checkpoint is None else "resume", found


if __name__ == "__main__":
    sys.exit(main())
