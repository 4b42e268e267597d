"""Writes the statistics of a hook as TensorBoard scalars.

::

    from torch.utils.tensorboard import SummaryWriter
    from commhooks.integrations.tensorboard import log_stats

    with SummaryWriter("runs/powersgd") as writer:
        ...
        log_stats(writer, handle, step)
"""

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError(
        "commhooks.integrations.tensorboard needs the package tensorboard: "
        "pip install 'commhooks[tensorboard]'"
    ) from error

from weakref import WeakKeyDictionary, ref

from commhooks.adapters.handle import HookHandle
from commhooks.hook.base import CommHook, tree

_written: "WeakKeyDictionary[SummaryWriter, dict[str, tuple[ref[CommHook], int]]]"
_written = WeakKeyDictionary()
"""The hook and the number of its notes that each writer has, by prefix."""


def log_stats(
    writer: SummaryWriter,
    handle: HookHandle,
    step: int,
    *,
    prefix: str = "commhooks",
    per_bucket: bool = False,
) -> None:
    """Write the present ``handle.stats()`` of this rank.

    The tags are ``prefix/wire_bytes`` and the other numbers of :class:`BucketStats` for the total,
    in bytes and seconds per step; ``prefix/metrics/<name>`` for the hook's own metrics; and with
    ``per_bucket`` also ``prefix/bucket <index>/wire_bytes`` and so on. Unknown values are left out.
    What the hook has decided since the last call, such as why ``auto`` made a new plan, is the text
    ``prefix/notes``, at the steps of the hook.
    """
    stats = handle.stats()
    for bucket in (stats.total, *(stats.buckets if per_bucket else ())):
        where = prefix if bucket.index is None else f"{prefix}/bucket {bucket.index}"
        for name, value in bucket.scalars().items():
            writer.add_scalar(f"{where}/{name}", value, step)
    for name, metric in stats.metrics.items():
        writer.add_scalar(f"{prefix}/metrics/{name}", metric, step)
    if isinstance(handle.hook, CommHook):
        _write_notes(writer, handle.hook, prefix)


def _write_notes(writer: SummaryWriter, hook: CommHook, prefix: str) -> None:
    counts = _written.setdefault(writer, {})
    notes = sorted(note for each in tree(hook) for note in each.notes())
    noted, count = counts.get(prefix, (None, 0))
    is_same = noted is not None and noted() is hook  # it may have been replaced
    for step, text in notes[count if is_same else 0 :]:
        writer.add_text(f"{prefix}/notes", text, step)
    counts[prefix] = ref(hook), len(notes)
