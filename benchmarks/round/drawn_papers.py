"""CPU time of what a voter looks at before a round: the papers that it draws, against all of them.

    python -m benchmarks.round.drawn_papers [--ids 64] [--json]

Of a middle stage's members, who list so many microbatches each, under two neighbours' signatures. What is timed is all
that one voter computes of the others' answers: unpacked, read, held against the entry, signatures checked.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.core.canonical import pack, unpack
from swarm.core.ids import MicrobatchId, StageIndex, Step, Version
from swarm.core.round.contribution import Contribution, Work
from swarm.core.settings import (
    BatchSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
)
from swarm.drawn_papers import drawn_entries
from swarm.identity.key import _MOST_REMEMBERED, Identity, verify
from verification.kinds.false_work import FalseWork, entry_check
from verification.pipeline.headers import BirthRecord, HopHeader
from verification.round.papers import Papers

MEMBERS = (3, 16, 64)
TIMES = 5


@dataclass(frozen=True)
class Neighbours:
    """Whoever signs what a member of a stage is given."""

    source: Identity
    before: Identity
    after: Identity

    @classmethod
    def made_up(cls) -> "Neighbours":
        source, before, after = (Identity.from_seed(bytes([number]) * 32) for number in (101, 102, 103))
        return cls(source, before, after)


def papers_of(
    settings: RunSettings,
    run_id: str,
    stage: StageIndex,
    step: Step,
    number: MicrobatchId,
    me: Identity,
    near: Neighbours,
) -> Papers:
    """What a member past the first stage has for a microbatch that it did, of tensors that nobody made."""
    shape, hidden = (settings.batch.microbatch_size, settings.data.sequence_length), 64
    birth = BirthRecord(
        run_id=run_id,
        source=near.source.peer_id,
        kind="train",
        microbatch_id=number,
        attempt=0,
        step=step,
        shape=shape,
        num_targets=shape[0] * shape[1],
        tokens_digest=bytes(32),
        targets_digest=bytes(32),
    ).signed_by(near.source)

    def header(of: int, maker: Identity, to: Identity, direction: str, *parents: bytes) -> HopHeader:
        return HopHeader(
            run_id=run_id,
            stage=StageIndex(of),
            version=Version(step),
            microbatch_id=number,
            attempt=0,
            direction="forward" if direction == "forward" else "gradient",
            producer=maker.peer_id,
            consumer=to.peer_id,
            parents=parents,
            shape=(*shape, hidden),
            dtype="fp32",
            codec="int8",
            numeric_class="torch/cpu/fp32",
            body_digest=hashlib.sha256(f"{of}/{direction}/{number}".encode()).digest(),
        ).signed_by(maker)

    earlier = (bytes(32),) if stage > 1 else ()
    came = header(stage - 1, near.before, me, "forward", birth.digest(), *earlier)
    if stage == settings.model.num_stages - 1:
        return Papers.received(birth, came)
    sent = header(stage, me, near.after, "forward", birth.digest(), came.digest())
    later = (bytes(32),) if stage + 1 < settings.model.num_stages - 1 else ()
    return Papers.received(birth, came, sent, header(stage + 1, near.after, me, "gradient", sent.digest(), *later))


def work_of(papers: Papers, version: Version) -> Work:
    """The entry that a contribution has for them."""
    birth, named = papers.birth, (papers.input_digest, papers.output_digest)
    return Work(birth.microbatch_id, birth.attempt, version, birth.num_targets, *named)


def settings_of(ids: int) -> RunSettings:
    return RunSettings(
        name="papers",
        protocol=1,
        model=ModelSettings(config_json="{}", stage_layers=((0, 1), (1, 2), (2, 3))),
        data=DataSettings(
            tokenizer="bytes",
            vocab_size=256,
            token_bytes=1,
            num_train_tokens=1 << 20,
            num_held_out_tokens=1 << 10,
            train_digest=bytes(32),
            held_out_digest=bytes(32),
            sequence_length=1024,
            chunk_tokens=1 << 16,
            seed=0,
        ),
        batch=BatchSettings(microbatch_size=1, target_tokens=1024 * ids),
        optimizer=OptimizerSettings(total_steps=100),
    )


def contribution(settings: RunSettings, number: int, ids: int) -> tuple[Contribution, list[bytes]]:
    """A member's, and each entry's papers as they come."""
    me, near = Identity.from_seed(number.to_bytes(32, "big")), Neighbours.made_up()
    stage, step = StageIndex(1), Step(3)
    shown = [papers_of(settings, "run", stage, step, MicrobatchId(number * ids + at), me, near) for at in range(ids)]
    work = tuple(work_of(papers, Version(3)) for papers in shown)
    made = Contribution("run", stage, step, bytes(32), me.peer_id, work, (bytes(32),))
    return replace(made, signature=me.sign(made.signed_bytes())), [pack(papers.to_value()) for papers in shown]


def seconds(
    settings: RunSettings, others: Sequence[tuple[Contribution, list[bytes]]], entries: Sequence[Sequence[int]]
) -> float:
    """CPU seconds for these entries of each."""
    check = entry_check(settings, is_of_stage=lambda peer, stage: True, on_lie=_honest)
    before = time.process_time()
    for (made, shown), drawn in zip(others, entries, strict=True):
        for entry in drawn:
            assert check(made, entry, unpack(shown[entry], max_bytes=1 << 16))
    return time.process_time() - before


def measured(num_members: int, ids: int) -> dict[str, float]:
    """Of one voter in a stage of so many: the least of some times, each of signatures that were not seen before."""
    settings = settings_of(ids)
    everyone = [contribution(settings, number + 1, ids) for number in range(num_members - 1)]
    rng = random.Random(0)
    drawn = [[drawn_entries(made, num_members=num_members, rng=rng) for made, _ in everyone] for _ in range(TIMES)]
    times = []
    for entries in drawn:
        _forget_signatures()
        times.append(seconds(settings, everyone, entries))
    _forget_signatures()
    whole = seconds(settings, everyone, [range(ids)] * len(everyone))
    count = sum(map(len, drawn[0]))
    share = count / (ids * len(everyone))
    one_false = 1.0 - (1.0 - len(drawn[0][0]) / ids) ** (num_members - 1)
    return {
        "drawn": count,
        "share": share,
        "drawn_ms": min(times) * 1e3,
        "all_ms": whole * 1e3,
        "shown_kb": sum(len(shown[entry]) for (_, shown), at in zip(everyone, drawn[0], strict=True) for entry in at)
        / 1e3,
        "one_false_found": one_false,
    }


def _honest(case: FalseWork) -> None:
    raise AssertionError(f"{case.accused} is honest")


def _forget_signatures() -> None:
    """Those found good are remembered, so many of them at most: others push them out."""
    me = Identity.from_seed(bytes(32))
    for number in range(_MOST_REMEMBERED + 1):
        data = number.to_bytes(4, "big")
        assert verify(me.peer_id, data, me.sign(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=64)
    parser.add_argument("--members", type=int, nargs="*", default=MEMBERS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = {str(number): measured(number, given.ids) for number in given.members}
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for number, figures in found.items():
        print(f"{number:>3} members: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
