"""What a host's ledger says of a run that went on from earlier states: its beginnings, its branches, who used what.

A run begins, and begins again whenever its stages continue from a state of before: each time with a genesis for every
stage. What was certified since the state that is taken is abandoned; the credit for it is not.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootstrap.program.books import Books, Credit
from bootstrap.program.ledger import Event, Ledger
from bootstrap.state.run_folder import RunFolder
from swarm.core.canonical import unpack
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.manifest.signed_run import MAX_SETTINGS_BYTES
from swarm.manifest.value import settings_from_value

MAX_FACTS_BYTES = 16 << 20


@dataclass(frozen=True)
class Start:
    """The stages begin, or begin again."""

    event: int
    """Number of the last of its events in the ledger."""
    to: int
    """Version whose state is taken."""
    version: int
    """What it counts as from now on."""


@dataclass(frozen=True)
class Certified:
    """A result that the host has recorded."""

    event: int
    lineage: int
    """How often its stage had begun by then."""
    stage: int
    step: int
    name: str
    ids: tuple[int, ...]
    credit: tuple[tuple[PeerId, int, int], ...]
    """(peer, microbatches, tokens)."""


@dataclass
class Branches:
    """All that was certified, in the order in which the host recorded it."""

    starts: list[Start] = field(default_factory=list)
    results: list[Certified] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Breaches that show as soon as the event is read: a number used twice, a state that nobody can have had."""
    branch: dict[int, dict[int, Certified]] = field(default_factory=lambda: defaultdict(dict))
    """By stage and step: what the run as it is now was made by."""
    abandoned: list[Certified] = field(default_factory=list)
    credit: dict[PeerId, Credit] = field(default_factory=dict)
    """What the host's books say."""
    lineages: Counter[int] = field(default_factory=Counter)
    """How often each stage has begun."""
    _to: dict[int, int] = field(default_factory=dict)
    """By the version that is gone on as, the version gone back to."""

    @classmethod
    def read(cls, path: Path) -> "Branches":
        """From the host's ledger; the host may be at work."""
        ledger = Ledger(path)
        try:
            return cls.of(list(ledger.events()))
        finally:
            ledger.close()

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Branches":
        found, books = cls(), Books()
        for event in events:
            books.apply(event)
            facts: Any = event.facts
            if event.kind == "rollback":
                found._to[facts["version"]] = facts["to"]
            elif event.kind == "genesis":
                found._begin(event.number, Genesis.from_value(facts))
            elif event.kind == "result":
                found._take(event.number, facts)
        found.credit = dict(books.credit)
        return found

    @property
    def num_stages(self) -> int:
        return len(self.lineages)

    def versions(self) -> list[int]:
        """The version that each stage has reached."""
        begun = self.starts[-1].version if self.starts else 0
        return [max([begun, *(step + 1 for step in self.branch[stage])]) for stage in sorted(self.lineages)]

    def version(self) -> int:
        """The version that all stages have reached."""
        return min(self.versions(), default=0)

    def highest(self) -> int:
        """The highest version that was ever certified in any stage."""
        return max([0, *(start.version for start in self.starts), *(made.step + 1 for made in self.results)])

    def _begin(self, number: int, genesis: Genesis) -> None:
        stage, version = int(genesis.stage), int(genesis.version)
        self.lineages[stage] += 1
        to = self._to.get(version, version)
        if self.lineages[stage] > len(self.starts):
            self.starts.append(Start(number, to, version))
        start = self.starts[self.lineages[stage] - 1]
        if (start.to, start.version) != (to, version):
            self.problems.append(f"stage {stage} begins at {version} as of {to}, another at {start}")
        made = [one.step + 1 for one in self.results if one.stage == stage and one.step >= version]
        if made:
            self.problems.append(f"stage {stage} begins again at version {version} after it made {max(made)}")
        held, first = self.branch[stage], self.lineages[stage] == 1
        if not first and to and to - 1 not in held and to not in {one.version for one in self.starts[:-1]}:
            self.problems.append(f"stage {stage} goes back to version {to}, which was not certified in its branch")
        self.abandoned += [made for step, made in held.items() if step >= to]
        self.branch[stage] = {step: made for step, made in held.items() if step < to}

    def _take(self, number: int, facts: Any) -> None:
        stage, step = int(facts["stage"]), int(facts["step"])
        credit = tuple((PeerId(peer), int(count), int(tokens)) for peer, count, tokens in facts["credit"])
        made = Certified(number, self.lineages[stage], stage, step, facts["name"].hex(), tuple(facts["ids"]), credit)
        held = self.branch[stage]
        begun = self.starts[-1].version if self.starts else 0
        if step in held:
            self.problems.append(f"stage {stage} has two results of step {step} in one branch")
        if step != begun and step - 1 not in held:
            self.problems.append(f"stage {stage}: a result of step {step} without one of the step before")
        held[step] = made
        self.results.append(made)

    def breaches(self) -> list[str]:
        """Whatever is wrong with it, in words; nothing, for a run in which everybody came back well."""
        found = list(self.problems)
        versions: dict[tuple[int, int], set[str]] = defaultdict(set)
        for made in self.results:
            versions[made.stage, made.step + 1].add(made.name)
        found += [
            f"stage {stage} has {len(names)} versions {version}"
            for (stage, version), names in sorted(versions.items())
            if len(names) > 1
        ]
        names = Counter((made.stage, made.name) for made in self.results)
        found += [
            f"stage {stage}: result {name[:8]} is recorded {count} times"
            for (stage, name), count in sorted(names.items())
            if count > 1
        ]
        return found + self._breaches_of_credit() + self._breaches_of_data()

    def _breaches_of_credit(self) -> list[str]:
        found = []
        sums: dict[PeerId, Credit] = {}
        for made in self.results:
            if sum(count for _, count, _ in made.credit) != len(made.ids):
                found.append(f"stage {made.stage} step {made.step}: credit for other than its {len(made.ids)} ids")
            for peer, count, tokens in made.credit:
                held = sums.get(peer, Credit())
                sums[peer] = Credit(held.num_tokens + tokens, held.num_microbatches + count, held.num_steps + 1)
        if sums != self.credit:
            found.append(f"the books give {self.credit}, the results {sums}")
        return found

    def _breaches_of_data(self) -> list[str]:
        used = Counter(number for made in self.branch[0].values() for number in made.ids)
        twice = sorted(number for number, count in used.items() if count > 1)
        return [f"microbatches {twice[:8]} were used twice in one branch"] if twice else []

    def used_before(self, version: int) -> set[int]:
        """Microbatches of stage 0's steps up to the version, in the branch as it is now."""
        return {number for step, made in self.branch[0].items() if step < version for number in made.ids}

    def breaches_of_leases(self, version: int, leases: LeaseTable, order: DataOrder) -> list[str]:
        """`leases` as the members of stage 0 have them at the version: each id is used, or somebody's to use.

        What was lost with an abandoned step is among them, for it is somebody's again.
        """
        used = self.used_before(version)
        left = {n for chunk in leases.open_chunks for start, stop in chunk.left for n in range(start, stop)}
        begun = set(range(leases.next_chunk * order.microbatches_per_chunk))
        found = []
        if used & left:
            found.append(f"version {version}: microbatches {sorted(used & left)[:8]} are used and are to be used again")
        if begun - used - left:
            skipped = sorted(begun - used - left)
            found.append(f"version {version}: {len(skipped)} microbatches are skipped: {skipped[:8]}...")
        lost = {number for made in self.abandoned if made.stage == 0 for number in made.ids}
        if lost - used - left:
            found.append(f"version {version}: what was lost is not done again: {sorted(lost - used - left)[:8]}")
        return found


def steps_lost(branches: Branches, since: Sequence[Certified]) -> dict[int, list[int]]:
    """By stage, steps of these results that are not in the branch as it is now."""
    lost: dict[int, list[int]] = defaultdict(list)
    for made in since:
        held = branches.branch[made.stage].get(made.step)
        if held is None or held.name != made.name:
            lost[made.stage].append(made.step)
    return dict(lost)


def data_order(folder: RunFolder) -> DataOrder:
    """Of the run that the host holds there."""
    return DataOrder.of_run(settings_from_value(unpack(folder.settings.read_bytes(), max_bytes=MAX_SETTINGS_BYTES)))


def versions_on_disk(folder: Path, stage: int) -> set[tuple[str, int]]:
    """Lineages and versions of which the peer has a whole snapshot."""
    names = [path.stem.split("-") for path in folder.glob(f"runs/*/snapshots-*/stage-{stage}-*.facts")]
    return {(lineage, int(version)) for _, _, lineage, version in names}


def common_versions(root: Path, stages: Sequence[Sequence[str]], *, above: int) -> list[int]:
    """By stage, the newest version above this of which all the stage's peers have a snapshot; 0 if there is none."""
    found = []
    for stage, names in enumerate(stages):
        held = set.intersection(*(versions_on_disk(root / name, stage) for name in names))
        found.append(max((version for _, version in held if version > above), default=0))
    return found


@dataclass(frozen=True)
class Kept:
    """A snapshot as it lies on a peer's disk."""

    chain: StageChain
    state: bytes


def kept_on_disk(root: Path, peers: Iterable[str]) -> dict[tuple[int, int, bytes], dict[str, Kept]]:
    """By stage, version and lineage: by peer, the snapshot that it has kept. Nobody writes meanwhile."""
    found: dict[tuple[int, int, bytes], dict[str, Kept]] = defaultdict(dict)
    for name in peers:
        for path in (root / name).glob("runs/*/snapshots-*/stage-*.facts"):
            facts = Fields("snapshot's facts", unpack(path.read_bytes(), max_bytes=MAX_FACTS_BYTES))
            chain = StageChain.from_value(facts.message("chain"))
            key = int(chain.stage), int(chain.version), chain.lineage
            found[key][name] = Kept(chain, path.with_suffix(".state").read_bytes())
    return dict(found)


def breaches_on_disk(root: Path, peers: Collection[str], branches: Branches, order: DataOrder) -> list[str]:
    """What is wrong with what the run's peers have kept, after all of it has ended."""
    found, held = [], kept_on_disk(root, peers)
    for (stage, version, _), kept in sorted(held.items()):
        who = " and ".join(sorted(kept))
        if len({one.state for one in kept.values()}) > 1:
            found.append(f"{who} hold different states of stage {stage} at version {version}")
        names = {one.chain.name.hex() for one in kept.values()}
        made = branches.branch[stage].get(version - 1)
        is_of_branch = made is not None and made.lineage == branches.lineages[stage]
        if len(names) > 1 or (made is not None and is_of_branch and names != {made.name}):
            found.append(f"{who} hold another version {version} of stage {stage} than the host has certified")
    begun = branches.starts[-1].version  # of which there is a snapshot until there are newer ones
    known = [key for key in held if key[0] == 0 and (key[1] - 1 in branches.branch[0] or key[1] == begun)]
    if not known:
        return [*found, "no snapshot of stage 0 is of a version that the host knows"]
    newest = max(known, key=lambda key: key[1])
    leases = next(iter(held[newest].values())).chain.leases
    return found + branches.breaches_of_leases(newest[1], leases, order)
