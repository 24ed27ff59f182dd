"""A seeded fault campaign against mempools, keepers and the client library: real processes, no vLLM.

`python -m tests.fault.campaign --steps 3000 --seed N`: 3000 hits around one mempool (campaign_world.py), then 750 on
two hosts (campaign_hosts.py), whose mempools copy between spaces, hosts, lent pages and host memory. One conductor
lets the processes advance protocol step by protocol step (campaign_*stories.py); at each counted step one process is
hit: kill -9, SIGSTOP ... SIGCONT, or its socket is cut, before, while or after the step is taken. Story, step, victim,
order and timing come from the seed. After every step the pools' memory and status are checked (campaign_oracle.py,
campaign_spaces.py), after every fault the supervisors' restarts follow (campaign_world.py), and after every episode
nothing may be left behind.
"""

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shared import settings
from tests.fault.campaign_host_plan import HOST_STORIES, tidy_hosts
from tests.fault.campaign_hosts import Hosts
from tests.fault.campaign_rig import Gone
from tests.fault.campaign_stories import STORIES, Ended, Refused, tidy
from tests.fault.campaign_world import World

REST_S = 30.0  # leases, handoffs and quarantine end within this time after an episode, and mostly at once
MAX_UNREPAIRED_STEPS = 2
PHASES = ("before", "while", "after")


class CampaignSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of the command line, or QUIRE_CAMPAIGN_* variables for pytest."""

    world: Literal["both", "pool", "hosts"] = (
        "both"  # one mempool; two that copy to each other; one after the other
    )
    steps: int = 320  # hits in the world of one mempool
    host_steps: int = 0  # in that of two hosts; 0: a quarter of the others
    story: str = ""  # only this one
    seed: int = 20261121
    budget_s: float = 0.0  # stop early after so long; 0: never


class Cell(msgspec.Struct, frozen=True):
    """One hit: where in which story, whom, how."""

    story: str
    step: str
    victim: str
    action: str
    phase: str


class Report(msgspec.Struct):
    """What a campaign did."""

    seed: int
    hits: list[Cell] = []
    num_protocol_steps: int = 0
    num_checks: int = 0
    num_pages_read: int = 0
    took_s: float = 0.0
    detections_s: dict[str, list[float]] = {}
    recoveries_s: list[float] = []
    counters: Counter[str] = Counter()

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"seed {self.seed}: {len(self.hits)} hits in {self.num_protocol_steps} protocol steps, "
            f"{self.took_s:.1f} s; the conductor checked the table {self.num_checks} times and compared "
            f"{self.num_pages_read} pages"
        )
        for key in ("action", "phase", "story"):
            found = Counter(getattr(hit, key) for hit in self.hits)
            yield f"  {key}: " + ", ".join(f"{name} {count}" for name, count in found.most_common())
        yield f"  distinct steps hit: {len({(hit.story, hit.step) for hit in self.hits})}"
        for name, found_s in sorted(self.detections_s.items()):
            what = name if " " in name else f"death of {name}"
            yield (
                f"  {what}: noticed {len(found_s)} times, median {statistics.median(found_s) * 1e3:.1f} ms, "
                f"most {max(found_s) * 1e3:.1f} ms"
            )
        if self.recoveries_s:
            yield (
                f"  recoveries: {len(self.recoveries_s)}, median {statistics.median(self.recoveries_s) * 1e3:.0f} ms, "
                f"most {max(self.recoveries_s) * 1e3:.0f} ms"
            )
        yield "  " + ", ".join(f"{name} {count}" for name, count in sorted(self.counters.items()))


class Campaign:
    """One world, many episodes.

    Args:
        stories: each with its weight.
        tidy: lets go of whatever a story left. Raises: Gone, Refused.
    """

    def __init__(self, world: World | Hosts, report: Report, stories: dict, tidy: Callable) -> None:
        self.world = world
        self.rng = world.rng
        self.report = report
        self.stories, self.tidy = stories, tidy
        self.seen: dict[str, Counter[str]] = {story: Counter() for story in stories}  # steps that came up

    def plan(self) -> Cell:
        """The step of a story that was hit least, and the victim that it was hit with least."""
        story = self.rng.choices(list(self.stories), [weight for _, weight in self.stories.values()])[0]
        hits = [hit for hit in self.report.hits if hit.story == story]
        steps = Counter(hit.step for hit in hits)
        known = sorted(self.seen[story])
        self.rng.shuffle(known)
        step = min(known, key=lambda name: steps[name], default="")
        pairs = Counter((hit.victim, hit.action) for hit in self.report.hits)
        choices = self.world.choices()
        self.rng.shuffle(choices)
        victim, action = min(choices, key=lambda pair: pairs[pair])
        return Cell(story, step, victim, action, self.rng.choice(PHASES))

    def episode(self) -> None:
        """One story with one hit; then everything is repaired and nothing is left behind."""
        # of its own, so that what one episode made of its chances does not change the next one
        self.rng = self.world.rng = random.Random(f"{self.report.seed}/{len(self.report.hits)}")
        world, cell = self.world, self.plan()
        world.faulted = world.late = False
        hit_at: list[str] = []

        def hit(step: str) -> None:
            hit_at.append(step)
            world.hit(cell.victim, cell.action)

        self._note(cell)
        world.clock.trace.append(f"==== {cell}")
        try:
            self._tell(cell, hit, hit_at)
        except (Gone, Refused, Ended) as error:
            if not (world.faulted or world.late):
                raise AssertionError("a story ended without a fault") from error
            world.counters[f"stories ended: {type(error).__name__}"] += 1
        world.clock.during = None
        if not hit_at:
            hit("end")
        self.report.hits.append(msgspec.structs.replace(cell, step=hit_at[0]))
        self._repair()
        self._rest()

    def _note(self, cell: Cell) -> None:
        self.current = cell

    def _tell(self, cell: Cell, hit, hit_at: list[str]) -> None:
        """Step by step."""
        world = self.world
        before = [instance.incarnation for instance in world.instances]
        unrepaired = 0
        due = ""
        for step in self.stories[cell.story][0](world):
            self.report.num_protocol_steps += 1
            self.seen[cell.story][step] += 1
            world.clock.trace.append(f"-- {step}")
            if due and not hit_at:
                hit(due)
            world.check()
            if world.damaged and not step.endswith(
                ("starts", "attaches", "again", "Holding", "on", "itself")
            ):
                unrepaired += 1
                if unrepaired > MAX_UNREPAIRED_STEPS or self.rng.random() < 0.5:
                    self._repair()
                    if before != [instance.incarnation for instance in world.instances]:
                        return
            if hit_at or due or step != cell.step:
                continue
            if cell.phase == "before":
                hit(step)
            elif cell.phase == "while":
                world.clock.during = lambda step=step: hit(step)
            else:
                due = step

    def _repair(self) -> None:
        self.world.recover()
        self.world.check()

    def _rest(self) -> None:
        """Nothing is leased, held over, in doubt or pinned but by the caches of living engines."""
        world = self.world
        for _ in range(3):
            try:
                self.tidy(world)
                break
            except (Gone, Refused) as error:
                world.counters[f"tidied again: {type(error).__name__}"] += 1
                world.recover()
        self._wait_for(world.what_is_busy, "the pool is at rest")
        world.check()

    def finale(self) -> None:
        """Everybody leaves; then every page is free or sealed and unpinned, and can be had again."""
        world = self.world
        for instance in world.instances:
            world.end(instance)
        world.check_detection()

        self._wait_for(world.what_is_left, "everything came back")
        world.check()
        world.empty()

    def _wait_for(self, obstacle: Callable[[], str], what: str) -> None:
        """Until there is none."""
        said = [""]

        def is_so() -> bool:
            said[0] = obstacle()
            return not said[0]

        try:
            self.world.clock.until(is_so, what, REST_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {said[0]}") from None


def run(found: CampaignSettings, folder: Path, world_name: str) -> Report:
    """All steps, or as many as the budget allows. Raises: AssertionError, with the seed and the step in a note."""
    report = Report(found.seed)
    began = time.monotonic()
    rng = random.Random(found.seed)
    num_steps = found.steps
    if world_name == "pool":
        world = World(folder, rng)
        campaign = Campaign(world, report, _only(STORIES, found.story), tidy)
    else:
        world = Hosts(folder, rng)
        campaign = Campaign(world, report, _only(HOST_STORIES, found.story), tidy_hosts)
        num_steps = steps_on_hosts(found)
    try:
        world.start()
        while len(report.hits) < num_steps:
            campaign.episode()
            if 0 < found.budget_s < time.monotonic() - began:
                break
        campaign.finale()
    except BaseException as error:
        error.add_note("\n".join(world.clock.trace))
        error.add_note(
            f"--world {world_name} --seed {found.seed}, hit {len(report.hits) + 1}: "
            f"{getattr(campaign, 'current', None)}"
        )
        raise
    finally:
        world.close()
        report.took_s = time.monotonic() - began
        report.detections_s = world.detections_s
        report.recoveries_s = world.recoveries_s
        report.counters = world.counters
        report.num_checks, report.num_pages_read = world.num_checks, world.num_pages_read
    return report


def _only(stories: dict, name: str) -> dict:
    return {name: stories[name]} if name else stories


def steps_on_hosts(found: CampaignSettings) -> int:
    """Hits in the world of two hosts."""
    return found.host_steps or found.steps // 4


def main(argv: Sequence[str]) -> int:
    found = settings.load(CampaignSettings, "campaign", argv)
    print(f"--steps {found.steps} --seed {found.seed}", flush=True)
    for name in ("pool", "hosts") if found.world == "both" else (found.world,):
        folder = Path(tempfile.mkdtemp(prefix=f"quire-campaign-{name}-"))
        try:
            report = run(found, folder, name)
        except BaseException:
            print(f"logs of the processes: {folder}", flush=True)
            raise
        shutil.rmtree(folder)
        print("\n".join(report.lines()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
