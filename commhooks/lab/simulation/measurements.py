"""All that is measured for a simulation: of the machine, and of a model under hooks.

A file keeps it, so that predictions for other networks and sizes take no time, and that a machine
which has the hardware can measure for one that has not.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from commhooks.cluster import Ranks
from commhooks.costs.gloo import Gloo
from commhooks.errors import CommHookError
from commhooks.lab.machine import cores
from commhooks.lab.simulation.calibration import measure_gloo
from commhooks.lab.simulation.dry_runs import Rehearsals
from commhooks.lab.simulation.measuring import Subject, rehearse_hooks

__all__ = ["Measurements", "measure"]

_TIMEOUT_SECONDS = 1800.0  # a large model on a small machine


@dataclass(frozen=True)
class Measurements:
    """Of one model, by hook: a config in JSON, with keys in order."""

    machine: str
    subject: Subject
    gloo: Gloo
    rehearsals: Mapping[str, Rehearsals]

    def of(self, config: Mapping[str, Any]) -> Rehearsals:
        """Of the hook with this config, which must be among them."""
        return self.rehearsals[_key(config)]

    def lacking(
        self, configs: Sequence[Mapping[str, Any]], sizes: Sequence[int]
    ) -> list[Mapping[str, Any]]:
        """Those of these hooks that have not been measured for all these sizes."""
        return [
            config
            for config in configs
            if not (known := self.rehearsals.get(_key(config))) or set(sizes) - known.by_size.keys()
        ]

    def with_more(self, other: "Measurements") -> "Measurements":
        """With what ``other`` has besides, or instead."""
        return replace(self, rehearsals={**self.rehearsals, **other.rehearsals})

    def save(self, path: Path) -> None:
        """Writes what :meth:`load` reads."""
        rehearsals = {key: rehearsals.to_json() for key, rehearsals in self.rehearsals.items()}
        data = {
            "machine": self.machine,
            "subject": asdict(self.subject),
            "gloo": asdict(self.gloo),
            "rehearsals": rehearsals,
        }
        path.write_text(json.dumps(data, indent=1))

    @classmethod
    def load(cls, path: Path) -> "Measurements":
        """Raises CommHookError if the file is not one of these."""
        try:
            data = json.loads(path.read_text())
            rehearsals = {
                key: Rehearsals.from_json(value) for key, value in data["rehearsals"].items()
            }
            subject, gloo = Subject(**data["subject"]), Gloo(**data["gloo"])
            return cls(data["machine"], subject, gloo, rehearsals)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommHookError(
                f"{path}: expected measurements that `commhooks simulate` has saved, found "
                f"something else ({type(error).__name__}: {error}); delete the file to measure anew"
            ) from error


def measure(
    subject: Subject,
    configs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    ranks: Ranks | None = None,
) -> Measurements:
    """Measures Gloo, the model and the hooks here; takes seconds to minutes, as the model is large.

    In ``ranks``, at least 2, if some are there, else in processes that are started for it.

    Raises ModelError; CommHookError for a hook that cannot be simulated. ``ranks`` are of no more
    use then.
    """
    company = min(subject.ranks_per_machine, cores())
    if ranks is None:
        with Ranks(max(2, company), timeout=_TIMEOUT_SECONDS) as own:
            return measure(subject, configs, sizes, own)
    gloo = measure_gloo(ranks)
    found = ranks(rehearse_hooks, subject, list(configs), list(sizes), company)[0]
    rehearsals = {_key(config): r for config, r in zip(configs, found, strict=True)}
    return Measurements(_machine(), subject, gloo, rehearsals)


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _machine() -> str:
    return f"{platform.machine()}, {platform.system()}, torch {torch.__version__}"
