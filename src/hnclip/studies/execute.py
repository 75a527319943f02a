"""Do what a plan lacks: one run after the other, beside other processes at the same plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hnclip.studies.plan import Job
from hnclip.studies.store import Busy, Store
from hnclip.util.text import duration

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """Part `number` of `count` of a plan, counted from 1."""

    number: int = 1
    count: int = 1

    def of(self, jobs: Sequence[Job]) -> list[Job]:
        """Every `count`-th run, whether it is done or not: all processes see the same plan."""
        return list(jobs[self.number - 1 :: self.count])


def parse_shard(text: str) -> Shard:
    """`2/4`: the second of four parts."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--shard is NUMBER/COUNT, for example 2/4, got {text!r}")
    return Shard(int(number), int(count))


@dataclass(frozen=True)
class Failure:
    """A run that could not be done, and why."""

    job: Job
    reason: str


def execute(
    jobs: Sequence[Job], store: Store, *, expected: Callable[[Job], float] = lambda job: 1.0, wait: float = 10.0
) -> list[Failure]:
    """Train and evaluate what is missing. A run that fails does not stop the others.

    Args:
        expected: how long each run should take, in any unit; the time left is said in proportion.
        wait: seconds between looks at a run that another process is doing.
    """
    waiting = [job for job in jobs if not store.is_done(job)]
    failures: list[Failure] = []
    total, finished = len(waiting), 0
    spent = done = 0.0
    left = sum(map(expected, waiting))
    told: set[str] = set()  # whom another process was found at
    while waiting:
        busy = []
        for job in waiting:
            if store.is_done(job):  # by another process, meanwhile
                finished += 1
                left -= expected(job)
                continue
            started = time.perf_counter()
            time_left = f", about {duration(spent / done * left)} left" if done else ""
            if str(job.identity) not in told:
                log.info(f"run {finished + 1} of {total}{time_left}: {job.title}")
            try:
                store.do(job)
            except Busy:
                if str(job.identity) not in told:
                    log.info("another process is working on it")
                    told.add(str(job.identity))
                busy.append(job)
                continue
            except (ValueError, OSError, RuntimeError) as error:
                failures.append(Failure(job, str(error)))
                log.warning(f"{job.title} failed: {error}")
            finished += 1
            spent += time.perf_counter() - started
            done += expected(job)
            left -= expected(job)
        waiting = busy
        if waiting:
            time.sleep(wait)
    return failures
