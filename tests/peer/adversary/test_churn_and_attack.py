"""Every ten steps three of ten peers die in mid-round while others lie: liars are banned, and nobody for dying."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarm.core.ids import PeerId
from tests.swarm_in_process import InProcessSwarm, SwarmPeer, identity_of, manifest_of, swarm_in_process

EVERY = 10
"""Steps."""
FIRST = 4
DYING_SHARE = 0.3
MOST_OF_STAGE = 2
"""Of five members and the host, four decide."""
KINDS = ("sign_flip", "activation_noise", "gradient_negate", "stale_weights")
"""One begins two steps before each time of dying: in stages 1 and 0 by turns."""


@dataclass(frozen=True)
class Churn:
    """A run in which peers die and lie."""

    steps: int
    replicas: int
    seed: int

    @property
    def dying_at(self) -> range:
        return range(FIRST, self.steps - EVERY // 2, EVERY)

    @property
    def attacks(self) -> dict[tuple[int, int], str]:
        """The last peers of each stage."""
        return {
            (1 - number % 2, self.replicas - 1 - number // 2): f"{kind}@{at - 2}"
            for number, (kind, at) in enumerate(zip(KINDS, self.dying_at, strict=False))
        }

    @property
    def liars(self) -> list[PeerId]:
        return [identity_of(stage * self.replicas + index).peer_id for stage, index in self.attacks]

    @property
    def manifest(self) -> str:
        return manifest_of(
            run={"trust": "public"},
            audits={"hop_budget": 1.0, "contribution_budget": 1.0},
            optimizer={"total_steps": self.steps},
            batch={"target_tokens": 2 * self.replicas * 32},
            limits={"founders_per_stage": self.replicas},
            checkpoint={"every_steps": 12, "snapshot_every": 4},
        )

    def dying(self, swarm: InProcessSwarm, rng: random.Random) -> list[SwarmPeer]:
        """Of the honest; at most two of a stage."""
        honest = [[peer for peer in swarm.of_stage(stage) if peer.peer_id not in self.liars] for stage in (0, 1)]
        drawn = [rng.sample(peers, MOST_OF_STAGE) for peers in honest]
        number = min(2 * MOST_OF_STAGE, round(DYING_SHARE * 2 * self.replicas))
        return rng.sample(drawn[0] + drawn[1], number)

    async def run(self, folder: Path) -> InProcessSwarm:
        """The swarm at its end."""
        rng, peers = random.Random(self.seed), (self.replicas, self.replicas)
        async with swarm_in_process(self.manifest, folder, peers=peers, attacks=self.attacks) as swarm:
            for version in self.dying_at:
                await swarm.until_version(version, timeout_s=240.0)
                dying = self.dying(swarm, rng)
                for peer in dying:
                    await swarm.kill(peer)
                for peer in dying[1:]:  # the round in which they died still goes on
                    await swarm.restart(peer)
                await swarm.add_peer(dying[0].stage)
            report = await swarm.finished(timeout_s=480.0)
            assert report["steps"] == self.steps
            for stage, digests in report["state_digests"].items():
                assert len(set(digests.values())) == 1, f"{self}: replicas of stage {stage} differ"
            return swarm

    def check(self, folder: Path) -> None:
        swarm = asyncio.run(self.run(folder))
        found = [event for event in swarm.events if event["event"] in ("banned", "quarantined", "acquitted")]
        said = [(event["event"], event.get("peer_id"), event.get("kind"), event.get("step")) for event in found]
        banned = [event["peer_id"] for event in found if event["event"] == "banned"]
        assert sorted(banned) == sorted(self.liars), (self, said)
        assert len(found) == len(banned), (self, said)


@pytest.mark.soak
def test_a_liar_is_banned_and_nobody_for_dying(tmp_path: Path) -> None:
    Churn(steps=12, replicas=5, seed=0).check(tmp_path)


@pytest.mark.soak
@pytest.mark.drawn(4)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(12))
def test_liars_are_banned_and_nobody_for_dying_again_and_again(tmp_path: Path, seed: int) -> None:
    Churn(steps=42, replicas=6, seed=seed).check(tmp_path)
