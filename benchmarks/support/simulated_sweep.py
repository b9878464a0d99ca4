"""Simulation of a sweep's workers by discrete events, in the order of `kvbench.cli.workers.work`, and the costs."""

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from benchmarks.support.worker_costs import Costs
from kvbench.cli.workers.work import Numbered, order_work

FREE, CLAIMED, DONE = range(3)
"""States of a block."""


@dataclass(frozen=True)
class Sweep:
    """Work of a sweep, in seconds.

    Attributes:
        jobs: runs, beside the reference that they share.
        blocks: of each run.
        block_seconds: mean time of a block.
        spread: standard deviation of a block's time, a share of the mean; times are log-normal.
        score_seconds: to score a run.
        load_seconds: from the start of a worker until its model is loaded.
        jitter: see `work.jitter`.
        seed: of the blocks' times and the jitter.
    """

    jobs: int
    blocks: int
    block_seconds: float
    spread: float = 0.0
    score_seconds: float = 0.0
    load_seconds: float = 0.0
    jitter: float = 0.0
    seed: int = 0


class Step(NamedTuple):
    """A worker's next step: what it is, calls on files and then seconds of its own."""

    kind: str
    calls: float = 0.0
    seconds: float = 0.0


Process = Iterator[Step]


@dataclass
class FileServer:
    """Server that all workers ask, first come first served; calls made together are served together.

    Args:
        rate: calls a second that it serves.
        latency: seconds that a call takes if nobody else asks.
    """

    rate: float = math.inf
    latency: float = 0.0
    served: Counter[int] = field(default_factory=Counter)
    _free: float = 0.0

    def serve(self, now: float, calls: float) -> float:
        """Return when calls made now have been answered."""
        if not calls:
            return now
        begin = max(now, self._free)
        self._free = begin + calls / self.rate
        for second in range(int(begin), int(self._free) + 1):
            part = min(self._free, second + 1) - max(begin, second)
            self.served[second] += part * self.rate if self._free > begin else calls
        return max(self._free, now + calls * self.latency)


class Run:
    """A run in a simulation: its blocks, who leads it, and whether it was scored."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds, self.states = seconds, bytearray(len(seconds))
        self.led = self.scoring = self.scored = False

    @property
    def whole(self) -> bool:
        """Whether all samples are there."""
        return self.states.count(DONE) == len(self.states)


class Outcome(NamedTuple):
    """Outcome of a simulated sweep.

    Attributes:
        seconds: from the first start to the last end.
        efficiency: time of all blocks divided by the number of workers and by `seconds`.
        peak: calls on files that were served in the busiest second.
        shares: of the workers' time, by kind of step.
    """

    seconds: float
    efficiency: float
    peak: float
    shares: dict[str, float]


class Simulation:
    """Workers that do a sweep.

    Args:
        sweep: the work.
        costs: of a worker's steps.
        workers: how many.
        server: where their files are.
    """

    def __init__(self, sweep: Sweep, costs: Costs, workers: int, server: FileServer) -> None:
        self.costs, self.sweep, self.server, self.now = costs, sweep, server, 0.0
        draw = random.Random(sweep.seed)
        sigma = math.sqrt(math.log1p(sweep.spread**2))
        mean = math.log(sweep.block_seconds) - sigma**2 / 2
        self.reference, *self.runs = (
            Run([draw.lognormvariate(mean, sigma) for _ in range(sweep.blocks)])
            for _ in range(sweep.jobs + 1)
        )
        self._workers = [
            SimulatedWorker(self, draw.uniform(0, sweep.jitter), draw.random()) for _ in range(workers)
        ]
        self._order, self._queue = count(), list[tuple[float, int, Process, bool]]()

    def run(self) -> Outcome:
        """Let all workers work until each has ended."""
        spent, ends = Counter[str](), []
        for worker in self._workers:
            self._push(0.0, worker.work(), works=True)
        while self._queue:
            self.now, _, process, works = heapq.heappop(self._queue)
            if (step := next(process, None)) is not None:
                answered = self.server.serve(self.now, step.calls)
                spent["files"] += answered - self.now
                spent[step.kind] += step.seconds
                self._push(answered + step.seconds, process, works=works)
            elif works:
                ends.append(self.now)
        seconds = max(ends)
        spent["idle"] += sum(seconds - end for end in ends)
        total = seconds * len(ends)
        drawing = sum(sum(run.seconds) for run in (self.reference, *self.runs))
        shares = {kind: part / total for kind, part in spent.items()}
        return Outcome(seconds, drawing / total, max(self.server.served.values(), default=0), shares)

    def save(self, run: Run, block: int) -> float:
        """Save a block beside other work; return when that will be done."""
        saved = self.server.serve(self.now, self.costs.block)
        self._push(saved, _end_block(run, block), works=False)
        return saved

    def _push(self, at: float, process: Process, *, works: bool) -> None:
        heapq.heappush(self._queue, (at, next(self._order), process, works))


def _end_block(run: Run, block: int) -> Process:
    run.states[block] = DONE
    yield from ()


class SimulatedWorker:
    """A worker in a simulation.

    What it finds refused changes nothing for others, so that the calls for it are collected and made before the next
    step that changes anything.
    """

    def __init__(self, simulation: Simulation, delay: float, place: float) -> None:
        self._all, self._costs, self._delay, self._place = simulation, simulation.costs, delay, place
        self._due, self._saved = 0.0, 0.0
        self._read: dict[Run, int] = {}

    def work(self) -> Process:
        """Do jobs in the order of real workers until none is left."""
        yield Step("loading", seconds=self._delay + self._all.sweep.load_seconds)
        for step in order_work(self._list_left, self._place):
            if isinstance(step, float):
                yield self._step("pausing", seconds=step)
            else:
                yield from self._attempt(self._all.runs[step.job[0]], joining=step.joining)
        yield self._step("files")

    def _list_left(self, left: Sequence[Numbered]) -> list[Numbered]:
        jobs = left or [(number, ()) for number in range(len(self._all.runs))]
        self._due += self._costs.look * len(jobs)
        return [job for job in jobs if not self._all.runs[job[0]].scored]

    def _step(self, kind: str, calls: float = 0.0, seconds: float = 0.0) -> Step:
        step, self._due = Step(kind, self._due + calls, seconds), 0.0
        return step

    def _attempt(self, run: Run, *, joining: bool) -> Process:
        def is_refused() -> bool:
            return run.scored or (run.led and not joining)

        if not is_refused():
            yield self._step("files")
        if is_refused():
            self._due += self._costs.refused
            return
        leads = not run.led
        run.led = True
        yield self._step("composing", self._costs.attempt, self._costs.attempt_seconds)
        yield from self._complete(self._all.reference, leads=leads)
        yield from self._complete(run, leads=leads)
        if leads:
            run.led = False

    def _complete(self, run: Run, *, leads: bool) -> Process:
        """Draw what is missing of a run, and score it unless another worker does; scores need the reference's.

        A worker that leads reads all samples before it scores, one that helps only if it scores, after a block.
        """
        if run.whole and not leads:
            return
        yield self._list_samples(run, read=leads)
        if not run.whole:
            yield from self._generate(run)
            yield self._list_samples(run, read=leads)
        comparable = run is self._all.reference or self._all.reference.scored
        if run.whole and comparable and not run.scoring:
            run.scoring = True
            if not leads:
                yield self._list_samples(run, read=True)
            yield self._step("scoring", self._costs.first, self._all.sweep.score_seconds)
            run.scored = True

    def _list_samples(self, run: Run, *, read: bool) -> Step:
        if not (run.whole and read):
            return self._step("files")
        blocks = len(run.states)
        fresh, self._read[run] = blocks - self._read.get(run, 0), blocks
        return self._step("files", self._costs.known * blocks + self._costs.read * fresh)

    def _generate(self, run: Run) -> Process:
        """Draw the blocks that nobody else draws; those that are claimed meanwhile are refused."""
        at, states = 0, run.states
        while (block := states.find(FREE, at)) >= 0:
            if busy := states.count(CLAIMED, at, block):
                self._due += self._costs.busy * busy
                yield self._step("files")
            if states[block] == FREE:
                states[block] = CLAIMED
                yield self._step("drawing", seconds=run.seconds[block])
                yield self._step("files", seconds=max(0.0, self._saved - self._all.now))  # its last block
                self._saved = self._all.save(run, block)
                self._read[run] = self._read.get(run, 0) + 1
                at = block + 1
            else:
                at = block
        self._due += self._costs.busy * states.count(CLAIMED, at)
        yield self._step("files", seconds=max(0.0, self._saved - self._all.now))
