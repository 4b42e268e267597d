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

_written: "WeakKeyDictionary[SummaryWriter, dict[str, tuple[ref[CommHook], list[int]]]]"
_written = WeakKeyDictionary()
"""By prefix, the hook, and how many notes of it and its nested hooks each writer has."""


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
    notes = [each.notes() for each in tree(hook)]
    noted, known = counts.get(prefix, (None, []))
    if noted is None or noted() is not hook:  # it may have been replaced
        known = [0] * len(notes)
    new = (note for of, count in zip(notes, known, strict=True) for note in of[count:])
    for step, text in sorted(new):
        writer.add_text(f"{prefix}/notes", text, step)
    counts[prefix] = ref(hook), [len(of) for of in notes]
