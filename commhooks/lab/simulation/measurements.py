"""What a simulation needs to know of a machine, and of a model with each hook.

The measurements can be saved to a file, so that predictions for other networks and sizes need no
new ones, and a machine that has the hardware can measure for one that does not.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from commhooks.costs.dry_runs import DryRuns
from commhooks.costs.gloo import Gloo
from commhooks.errors import CommHookError
from commhooks.hook.spec import HookLike, config_of
from commhooks.lab.models import Workload

__all__ = ["Job", "Measurements", "hook_key"]


@dataclass(frozen=True)
class Job(Workload):
    """A workload and how it is launched."""

    ranks_per_node: int = 1
    ranks_per_machine: int = 1
    """Ranks that share the memory of this machine; as many processes measure at the same time."""
    bucket_cap_mb: float | None = None
    first_step: int = 1000
    """The first of the steps whose mean is predicted; the default is past all warm-ups."""


@dataclass(frozen=True)
class Measurements:
    """The measurements of one job. ``dry_runs`` are by hook, see :func:`hook_key`.

    ``reasons`` say why hooks are missing that cannot be simulated; they are not saved.
    """

    machine: str
    job: Job
    gloo: Gloo
    dry_runs: Mapping[str, DryRuns]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, hook: HookLike) -> bool:
        return hook_key(hook) in self.dry_runs

    def reason(self, hook: HookLike) -> str | None:
        """Return why a hook cannot be simulated, or None if it can."""
        return self.reasons.get(hook_key(hook))

    def of(self, hook: HookLike) -> DryRuns:
        """Return the dry runs of a measured hook."""
        return self.dry_runs[hook_key(hook)]

    def lacking(self, hooks: Sequence[HookLike], sizes: Sequence[int]) -> list[HookLike]:
        """Return the hooks that have not been measured for all ``sizes``."""
        return [
            hook
            for hook in hooks
            if not (known := self.dry_runs.get(hook_key(hook))) or set(sizes) - known.by_size.keys()
        ]

    def with_more(self, other: "Measurements") -> "Measurements":
        """Return these measurements with the dry runs of ``other`` added or replaced."""
        return replace(self, dry_runs={**self.dry_runs, **other.dry_runs}, reasons=other.reasons)

    def save(self, path: Path) -> None:
        """Write the file that :meth:`load` reads."""
        data = {
            "machine": self.machine,
            "job": asdict(self.job),
            "gloo": asdict(self.gloo),
            "dry_runs": {key: runs.to_json() for key, runs in self.dry_runs.items()},
        }
        path.write_text(json.dumps(data, indent=1))

    @classmethod
    def load(cls, path: Path) -> "Measurements":
        """Read a file of :meth:`save`. Raises CommHookError if it is not such a file."""
        try:
            data = json.loads(path.read_text())
            dry_runs = {key: DryRuns.from_json(runs) for key, runs in data["dry_runs"].items()}
            return cls(data["machine"], Job(**data["job"]), Gloo(**data["gloo"]), dry_runs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommHookError(
                f"{path}: expected measurements that `commhooks simulate` has saved, found "
                f"something else ({type(error).__name__}: {error}); delete the file to measure "
                "again"
            ) from error


def hook_key(hook: HookLike) -> str:
    """Return the hook's config in JSON, with sorted keys."""
    return json.dumps(config_of(hook), sort_keys=True)
