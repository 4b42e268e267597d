"""Run the random trial of a seed under a torchft manager: a replica group dies and comes back.

PYTHONPATH=tests python -m soak.members 1020

A process of its own: the server of torchft has threads, and other trials fork.
"""

import os
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("RUST_LOG", "error")  # read when the lighthouse is loaded
from support.elastic_members import HOOKS, check_return, plans_of


def main(seed: int) -> None:
    """Raise AssertionError if something contradicts docs/integrations/sites.md."""
    rng = random.Random(seed)
    name = rng.choice(list(HOOKS))
    replicas = rng.choice((2, 2, 3, 4))
    # As many processes as four replicas have.
    shards = rng.choice((1, 2)) if replicas == 2 and name in ("local_sgd", "int8", "delay") else 1
    dies_at = rng.randrange(3, 30)
    pause = rng.choice((0.0, 0.02))
    print(f"{name}, {replicas} replicas of {shards}, one dies at {dies_at}, pause {pause}")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        plans = plans_of(HOOKS[name], Path(folder), replicas, shards=shards, pause=pause)
        staying, dying = plans[:-shards], plans[-shards:]
        dying = [replace(plan, dies_at=dies_at) for plan in dying]
        # Before that there need not have been an outer step.
        check_return([*staying, *dying], has_momentum=dies_at >= 8)


if __name__ == "__main__":
    main(int(sys.argv[1]))
