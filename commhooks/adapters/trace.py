"""Traces of single steps, in the trace-event format of Chrome and Perfetto.

There is one file per rank. The rank is the process of its events, and the tracks are

    backward    gradients as they arrive; packing and launching; then waiting and unpacking
    bucket 0    its hook from beginning to end, with each collective and the wait for its turn
    bucket 1    ...
    exchanges   between steps, one track per bucket on which they began

Times are microseconds of CLOCK_MONOTONIC, which all processes of a machine share.
Format: "Trace Event Format", Google, 2016, https://chromium.googlesource.com/catapult.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commhooks.adapters.adapter import Adapter
from commhooks.errors import CommHookError
from commhooks.runtime.recording import Recording, Run, Span

Event = dict[str, Any]
Times = tuple[int, int]
"""Start and end times, in nanoseconds."""

_BACKWARD = 0  # track; that of bucket b is b + 1
_EXCHANGES = 1_000_000  # track of those that began on bucket 0


@contextmanager
def trace(adapter: Adapter, path: str | os.PathLike[str], about: Event) -> Iterator[Path]:
    """See :meth:`HookHandle.trace`. ``about``: additional metadata of the file."""
    target = Path(path)
    if adapter.rank > 0:
        target = target.with_suffix(f".rank{adapter.rank}{target.suffix}")
    if not target.parent.is_dir():
        raise CommHookError(f"cannot write {target}: there is no directory {target.parent}")
    if adapter.recording is not None:
        raise CommHookError(
            "a trace of this model is being recorded already; leave its `with` block first"
        )
    adapter.start_recording()
    try:
        yield target
    finally:
        recording = adapter.stop_recording()
        about |= {
            "device": adapter.device.type,
            "times": "the host's"
            if adapter.device.type == "cpu"
            else "the host's, not the device's",
        }
        rank, size = adapter.rank, adapter.world_size
        target.write_text(json.dumps(_document(recording, rank, size, about)))


def merge_traces(paths: Iterable[str | os.PathLike[str]], target: str | os.PathLike[str]) -> None:
    """Write the traces of several ranks into one file, on one time axis.

    Ranks of one machine share a clock. Those of other machines are shifted by the difference of the
    times of day, so they are as exact as these are synchronized (NTP: about a millisecond).

    Raises:
        CommHookError: :meth:`HookHandle.trace` has not written one of the files, or there is none.
    """
    documents = [_read(Path(path)) for path in paths]
    if not documents:
        raise CommHookError("merge_traces: expected the path of at least one trace, found none")
    first = documents[0]["otherData"]
    events: list[Event] = []
    for document in documents:
        about = document["otherData"]
        shift = about["clock_to_unix_us"] - first["clock_to_unix_us"]
        if about["host"] == first["host"]:
            shift = 0.0
        for event in document["traceEvents"]:
            if "ts" in event:
                event["ts"] += shift
        events += document["traceEvents"]
    ranks = [document["otherData"] for document in documents]
    merged = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"ranks": ranks}}
    Path(target).write_text(json.dumps(merged))


def _document(recording: Recording, rank: int, size: int, about: Event) -> Event:
    return {
        "traceEvents": _Events(recording, rank).all,
        "displayTimeUnit": "ms",
        "otherData": {
            "rank": rank,
            "world_size": size,
            "host": socket.gethostname(),
            "clock": "CLOCK_MONOTONIC",
            "clock_to_unix_us": (time.time_ns() - time.monotonic_ns()) / 1e3,
            **about,
        },
    }


class _Events:
    """The events of a rank, with the names of the process and its tracks, and their order."""

    def __init__(self, recording: Recording, rank: int) -> None:
        self.all: list[Event] = []
        self._rank = rank
        self._named: set[tuple[str, int]] = set()
        self._name("process", _BACKWARD, f"rank {rank}", rank)
        self._name("thread", _BACKWARD, "backward", _BACKWARD)
        for span in sorted(recording.spans, key=lambda span: (span.start_ns, -span.end_ns)):
            self._add_span(span, recording)
        for run in recording.runs:
            if run.is_exchange:
                track = _EXCHANGES + run.index
                self._name("thread", track, f"exchanges, bucket {run.index}", track)
                times = run.start_ns, run.end_ns
                self._add_run("exchange", "exchange", track, times, run, bucket=run.index)

    def _add_span(self, span: Span, recording: Recording) -> None:
        what, index, times = span.activity, span.index, (span.start_ns, span.end_ns)
        if what == "gradient":
            self._add(recording.parameters[index], what, _BACKWARD, times[0], ph="i", s="t")
        elif what == "hook":
            track = index + 1
            self._name("thread", track, f"bucket {index}", track)
            about = {"bucket": index, "parameters": list(span.names)}
            run = recording.run_of(span)
            self._add_run(span.hook or "hook", what, track, times, run, **about)
        elif what in ("backward", "drain"):
            self._add_slice(f"{what}, step {index}", what, _BACKWARD, times, step=index)
        else:
            self._add_slice(f"{what} bucket {index}", what, _BACKWARD, times, bucket=index)

    def _add_run(
        self, name: str, category: str, track: int, times: Times, run: Run | None, **args: Any
    ) -> None:
        """Add a slice for a hook or an exchange, and those of its collectives."""
        sent = None if run is None else run.wire_bytes
        self._add_slice(name, category, track, times, **args, wire_bytes=sent)
        for number, stage in enumerate(run.stages if run else ()):
            if stage.issued_ns > stage.awaited_ns:
                turn = stage.awaited_ns, stage.issued_ns
                self._add_slice("wait for turn", "turn", track, turn, stage=number)
            about = {"wire_bytes": stage.wire_bytes, "ranks": list(stage.ranks) or "all"}
            times = stage.issued_ns, stage.completed_ns
            self._add_slice(stage.operation, "stage", track, times, stage=number, **about)

    def _add_slice(self, name: str, category: str, track: int, times: Times, **args: Any) -> None:
        start_ns, end_ns = times
        self._add(name, category, track, start_ns, ph="X", dur=(end_ns - start_ns) / 1e3, args=args)

    def _add(self, name: str, category: str, track: int, start_ns: int, **others: Any) -> None:
        at = {"ts": start_ns / 1e3, "pid": self._rank, "tid": track}
        self.all.append({"name": name, "cat": category, **at, **others})

    def _name(self, what: str, track: int, name: str, order: int) -> None:
        if (what, track) in self._named:
            return
        self._named.add((what, track))
        about = {f"{what}_name": {"name": name}, f"{what}_sort_index": {"sort_index": order}}
        at = {"ph": "M", "pid": self._rank, "tid": track}
        self.all += ({"name": key, **at, "args": args} for key, args in about.items())


def _read(path: Path) -> Event:
    try:
        document: Event = json.loads(path.read_text())
        document["otherData"]["clock_to_unix_us"], document["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise CommHookError(
            f"{path} is not a trace of one rank, as handle.trace() writes it: {error!r}"
        ) from error
    return document
