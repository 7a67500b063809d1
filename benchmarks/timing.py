"""Device time of compiled functions, from the profiler's own trace of the GPU's streams.

Functions that are compared run in turns, after a second of the same work: a GPU that grows warm
lowers its clock, and both have to feel it alike.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

RUNS = 20
WARM_SECONDS = 1.0
COUNTING_RUNS = 2


class TimingError(RuntimeError):
    """The trace does not hold what ran."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a stream of the GPU did: a kernel, a copy, a fill.

    Attributes:
      name: of it, of fills without the number that the profiler gives them.
      start, duration: in nanoseconds.
    """

    name: str
    start: float
    duration: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Medians over runs.

    Attributes:
      busy: seconds that the run's kernels took.
      span: seconds from the first one's start to the last one's end.
      runs: how many.
      kernels: (name, seconds) in the order of their start.
    """

    busy: float
    span: float
    runs: int
    kernels: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A function to time.

    Attributes:
      name: among those that it is compared with.
      function: of arrays.
      args: arrays, or their shapes as long as it is only compiled.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def copy_job(name: str, moved: float) -> Job:
    """A device copy that reads and writes `moved` bytes together."""
    noise = jax.random.bits(jax.random.key(5), (int(moved) // 2,), jnp.uint8)
    return Job(name=name, function=jnp.copy, args=(noise,))


def compile_all(jobs: Sequence[Job]) -> list[Callable[..., Any]]:
    """The jobs' functions compiled, several at once."""

    def compile_one(job: Job) -> Callable[..., Any]:
        return jax.jit(job.function).lower(*job.args).compile()

    return concurrently(compile_one, jobs)


def concurrently[A, B](function: Callable[[A], B], arguments: Iterable[A]) -> list[B]:
    """The function's results, several at once: for compiling, which leaves Python alone."""
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, arguments))


def measure_jobs(jobs: Sequence[Job], *, runs: int = RUNS) -> dict[str, Time]:
    """Compiles jobs and runs them in turns: name -> time."""
    compiled = compile_all(jobs)
    return measure(
        {
            job.name: lambda f=f, args=job.args: f(*args)
            for f, job in zip(compiled, jobs, strict=True)
        },
        runs=runs,
    )


def measure(calls: Mapping[str, Callable[[], Any]], *, runs: int = RUNS) -> dict[str, Time]:
    """Runs calls in turns: name -> time.

    Args:
      calls: compiled functions with their arguments; at least one kernel each, the same ones every
        time.
      runs: of each.

    Raises:
      TimingError: a call ran nothing on the GPU, or not the same every time.
    """
    until = time.monotonic() + WARM_SECONDS
    turns = 0
    while turns < 3 or time.monotonic() < until:
        for call in calls.values():
            jax.block_until_ready(call())
        turns += 1
    counts = {name: _count(name, call) for name, call in calls.items()}
    with _trace() as events:
        for _ in range(runs):
            for call in calls.values():
                result = call()
        jax.block_until_ready(result)
    return {name: summary(found) for name, found in split(events, counts, runs).items()}


def split(
    events: Sequence[Event], counts: Mapping[str, int], runs: int
) -> dict[str, list[list[Event]]]:
    """The events of each call's runs, where the calls ran in turns.

    Args:
      events: in the order of their start.
      counts: how many events a run of each call has, in the order of the calls.
      runs: of each call.

    Raises:
      TimingError: there are more events or fewer, or a call's runs differ.
    """
    wanted = runs * sum(counts.values())
    if len(events) != wanted:
        raise TimingError(f"the trace holds {len(events)} events, wanted {wanted} ({counts})")
    rest = iter(events)
    found: dict[str, list[list[Event]]] = {name: [] for name in counts}
    for _ in range(runs):
        for name, count in counts.items():
            found[name].append(list(itertools.islice(rest, count)))
    for name, of_call in found.items():
        kinds = {tuple(sorted(event.name for event in run)) for run in of_call}
        if len(kinds) != 1:
            raise TimingError(f"the runs of {name!r} differ: {sorted(kinds)[:2]}")
    return found


def summary(runs: Sequence[Sequence[Event]]) -> Time:
    """Medians over the runs of one call."""
    return Time(
        busy=1e-9 * statistics.median(sum(event.duration for event in run) for run in runs),
        span=1e-9
        * statistics.median(
            max(event.start - run[0].start + event.duration for event in run) for run in runs
        ),
        runs=len(runs),
        kernels=tuple(
            (events[0].name, 1e-9 * statistics.median(event.duration for event in events))
            for events in zip(*runs, strict=True)
        ),
    )


def _count(name: str, call: Callable[[], Any]) -> int:
    """How many events a run of `call` has."""
    with _trace() as events:
        for _ in range(COUNTING_RUNS):
            result = call()
        jax.block_until_ready(result)
    count, left = divmod(len(events), COUNTING_RUNS)
    if not count or left:
        kinds = collections.Counter(event.name for event in events)
        raise TimingError(f"{COUNTING_RUNS} runs of {name!r} left {len(events)} events: {kinds}")
    return count


@contextlib.contextmanager
def _trace() -> Iterator[list[Event]]:
    """A list that holds the GPU's events once the context is left."""
    events: list[Event] = []
    folder = tempfile.mkdtemp()
    try:
        with jax.profiler.trace(folder):
            yield events
        events += sorted(_read(Path(folder)), key=lambda event: event.start)
    finally:
        shutil.rmtree(folder)


def _read(folder: Path) -> Iterator[Event]:
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if "/device:GPU" in plane.name:
                for line in plane.lines:
                    if "Stream" in line.name:
                        for event in line.events:
                            yield Event(
                                name=re.sub(r"^(Memset) \d+$", r"\1", event.name),
                                start=event.start_ns,
                                duration=event.duration_ns,
                            )
