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
from commhooks.runtime.recording import Recording, Run, Span, Stage

Event = dict[str, Any]

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
        events += (_shifted(event, shift) for event in document["traceEvents"])
    ranks = [document["otherData"] for document in documents]
    merged = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"ranks": ranks}}
    Path(target).write_text(json.dumps(merged))


def _document(recording: Recording, rank: int, size: int, about: Event) -> Event:
    spans = sorted(recording.spans, key=lambda span: (span.start_ns, -span.end_ns))
    events = [*_names(recording, rank)]
    for span in spans:
        events += _events(span, recording, rank)
    for run in recording.runs:
        if run.is_exchange:
            events += _exchange_events(run, rank)
    return {
        "traceEvents": events,
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


def _names(recording: Recording, rank: int) -> Iterator[Event]:
    """Yield the names of the process and its tracks, and their order."""
    yield _named("process_name", rank, _BACKWARD, name=f"rank {rank}")
    yield _named("process_sort_index", rank, _BACKWARD, sort_index=rank)
    tracks = {_BACKWARD: "backward"}
    tracks |= {s.index + 1: f"bucket {s.index}" for s in recording.spans if s.activity == "hook"}
    tracks |= {
        _EXCHANGES + run.index: f"exchanges, bucket {run.index}"
        for run in recording.runs
        if run.is_exchange
    }
    for track, name in tracks.items():
        yield _named("thread_name", rank, track, name=name)
        yield _named("thread_sort_index", rank, track, sort_index=track)


def _named(what: str, rank: int, track: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": args}


def _events(span: Span, recording: Recording, rank: int) -> Iterator[Event]:
    if span.activity == "gradient":
        name = recording.parameters[span.index]
        yield {**_event(name, span, rank, _BACKWARD), "ph": "i", "s": "t"}
    elif span.activity == "hook":
        yield from _hook_events(span, recording.run_of(span), rank)
    elif span.activity in ("backward", "drain"):
        args = {"step": span.index}
        yield _slice(f"{span.activity}, step {span.index}", span, rank, _BACKWARD, args)
    else:
        args = {"bucket": span.index}
        yield _slice(f"{span.activity} bucket {span.index}", span, rank, _BACKWARD, args)


def _hook_events(span: Span, run: Run | None, rank: int) -> Iterator[Event]:
    track = span.index + 1
    args = {
        "bucket": span.index,
        "parameters": list(span.names),
        "wire_bytes": None if run is None else run.wire_bytes,
    }
    yield _slice(span.hook or "hook", span, rank, track, args)
    for number, stage in enumerate(run.stages if run else ()):
        yield from _stage_events(track, number, stage, rank)


def _exchange_events(run: Run, rank: int) -> Iterator[Event]:
    track = _EXCHANGES + run.index
    span = Span("exchange", run.index, run.start_ns, run.end_ns)
    args = {"bucket": run.index, "wire_bytes": run.wire_bytes}
    yield _slice("exchange", span, rank, track, args)
    for number, stage in enumerate(run.stages):
        yield from _stage_events(track, number, stage, rank)


def _stage_events(track: int, number: int, stage: Stage, rank: int) -> Iterator[Event]:
    if stage.issued_ns > stage.awaited_ns:
        turn = Span("turn", track, stage.awaited_ns, stage.issued_ns)
        yield _slice("wait for turn", turn, rank, track, {"stage": number})
    span = Span("stage", track, stage.issued_ns, stage.completed_ns)
    args = {"stage": number, "wire_bytes": stage.wire_bytes, "ranks": list(stage.ranks) or "all"}
    yield _slice(stage.operation, span, rank, track, args)


def _slice(name: str, span: Span, rank: int, track: int, args: Event) -> Event:
    event = _event(name, span, rank, track)
    return {**event, "ph": "X", "dur": (span.end_ns - span.start_ns) / 1e3, "args": args}


def _event(name: str, span: Span, rank: int, track: int) -> Event:
    start_us = span.start_ns / 1e3
    return {"name": name, "cat": span.activity, "ts": start_us, "pid": rank, "tid": track}


def _read(path: Path) -> Event:
    try:
        document: Event = json.loads(path.read_text())
        document["otherData"]["clock_to_unix_us"], document["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise CommHookError(
            f"{path} is not a trace of one rank, as handle.trace() writes it: {error!r}"
        ) from error
    return document


def _shifted(event: Event, shift_us: float) -> Event:
    return {**event, "ts": event["ts"] + shift_us} if "ts" in event else event
