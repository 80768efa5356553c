"""The fold of a stage's past: the same at every member, from any starting point."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import pytest

from swarm.core.canonical import Value, pack, unpack
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.errors import RemoteError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.round.contribution import MAX_ATTEMPTS, Contribution, Departure, ReducedPart, Result, Roster, Work
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.identity.key import Identity
from swarm.manifest.file import assumed_data, freeze, parse_manifest
from tests.swarm.core.audit.chances import HOST_CHAIN, chance_of, link_of, said_by

PEERS = tuple(PeerId(f"peer {number}") for number in range(6))
HOST, RUN_KEY, NEAR = PeerId("host"), PeerId("run key"), (PeerId("near 0"), PeerId("near 1"))


def _settings() -> RunSettings:
    manifest = parse_manifest("", Path("run.toml"))
    return freeze(manifest, assumed_data(manifest), [bytes([stage]) * 32 for stage in range(manifest.model.num_stages)])


SETTINGS = _settings()


def _genesis(stage: int = 0, members: tuple[PeerId, ...] = PEERS[:3]) -> Genesis:
    state, end = bytes(range(32)), HOST_CHAIN.end
    return Genesis("run", StageIndex(stage), Version(4), state, members, LeaseTable(), HOST, RUN_KEY, NEAR, end)


def _result(
    chain: StageChain,
    works: Mapping[PeerId, tuple[Work, ...]],
    *,
    joins: tuple[PeerId, ...] = (),
    leaves: tuple[PeerId, ...] = (),
    unheard: tuple[PeerId, ...] = (),
    neighbours: tuple[PeerId, ...] = NEAR,
) -> Result:
    made = tuple(
        Contribution(
            chain.run_id,
            chain.stage,
            Step(chain.version),
            chain.name,
            peer,
            works[peer],
            (bytes(32),),
            chance_of(peer, chain.version),
        )
        for peer in sorted(works)
        if works[peer]
    )
    leader = next(peer for peer in chain.members if peer not in leaves)
    roster = Roster(
        chain.run_id,
        chain.stage,
        Step(chain.version),
        0,
        0,
        leader,
        chain.name,
        chain.members,
        made,
        (leader,) if made else (),
        joins,
        tuple(Departure(peer, "gone") for peer in leaves),
        "full",
        neighbours,
    )
    heard = tuple(one.peer_id for one in made if one.peer_id not in unheard)
    parts = (ReducedPart(0, b"0" * 32, heard) if heard else ReducedPart.empty(0),) if made else ()
    return Result(roster, parts, leader)


def _work(number: int, *, attempt: int = 0, num_tokens: int = 8) -> Work:
    return Work(MicrobatchId(number), attempt, Version(0), num_tokens, bytes(32), bytes(32))


def test_members_agree_on_the_leaders_before_and_after_the_step_before_has_ended() -> None:
    """Microbatches of step t + 1 are under way while round t runs: some members know its result, others do not."""
    rng = random.Random(5)
    chain = StageChain.begin(_genesis(), SETTINGS)
    assert chain.leaders(Step(4)) == StageChain.begin(_genesis(), SETTINGS).leaders(Step(4))
    for _ in range(40):
        early = chain.leaders(Step(chain.version + 1))
        leaves = tuple(peer for peer in chain.members if rng.random() < 0.2)[: len(chain.members) - 1]
        joins = tuple(peer for peer in PEERS if peer not in chain.members and rng.random() < 0.4)
        before = chain
        chain = chain.advance(_result(chain, {}, joins=joins, leaves=leaves), SETTINGS)
        late = chain.leaders(Step(chain.version))
        assert late[: len(early)] == early
        assert late[len(early) :] == tuple(peer for peer in chain.members if peer not in before.members)
        assert set(chain.members) <= set(late)
        assert chain.members == tuple(sorted((set(before.members) - set(leaves)) | set(joins)))
        assert chain.version == before.version + 1


def test_the_order_of_leaders_changes_from_step_to_step() -> None:
    chain, first = StageChain.begin(_genesis(members=PEERS), SETTINGS), set()
    for _ in range(40):
        first.add(chain.leaders(Step(chain.version))[0])
        chain = chain.advance(_result(chain, {}), SETTINGS)
    assert first == set(PEERS)


def test_every_member_folds_the_same_chain_and_its_value_is_exact() -> None:
    rng = random.Random(3)
    chain = other = StageChain.begin(_genesis(), SETTINGS)
    for _ in range(12):
        works = {
            peer: tuple(_work(number) for number in chain.leases.ids_of(peer)[: rng.randint(0, 3)])
            for peer in chain.members
        }
        result = _result(chain, works)
        chain = chain.advance(result, SETTINGS)
        other = StageChain.from_value(unpack(pack(other.to_value()), max_bytes=1 << 20)).advance(result, SETTINGS)
        assert other == chain
        assert chain.lineage == _genesis().name
    assert chain.leases.consumed > 0


def test_whoever_joins_at_stage_0_gets_a_lease_and_a_leavers_ids_go_on() -> None:
    chain = StageChain.begin(_genesis(members=PEERS[:2]), SETTINGS)
    ids_each = 2 * SETTINGS.microbatches_per_step
    mine = chain.leases.ids_of(PEERS[0])
    assert len(mine) >= ids_each
    chain = chain.advance(_result(chain, {}, joins=(PEERS[2],), leaves=(PEERS[0],)), SETTINGS)
    assert chain.members == (PEERS[1], PEERS[2])
    assert chain.leases.ids_of(PEERS[0]) == []
    assert set(mine) <= {number for peer in chain.members for number in chain.leases.ids_of(peer)}


def test_leases_do_not_matter_past_stage_0() -> None:
    chain = StageChain.begin(_genesis(stage=1), SETTINGS)
    assert chain.advance(_result(chain, {PEERS[0]: (_work(3),)}), SETTINGS).leases == LeaseTable()


def test_what_one_lists_changes_nothing_of_what_counts_of_another() -> None:
    """Else whoever lists everybody's ids has all the weight, or leaves the step without any."""
    honest = {PEERS[0]: (_work(1), _work(2)), PEERS[1]: (_work(3),)}
    everything = tuple(_work(number, attempt=MAX_ATTEMPTS - 1) for number in range(64))
    chain = StageChain.begin(_genesis(stage=1), SETTINGS)
    for _ in range(3):
        result = _result(chain, {**honest, PEERS[2]: everything})
        weights = chain.weights_of(result.roster, SETTINGS)
        assert (weights[PEERS[0]], weights[PEERS[1]]) == (16, 8)
        chain = chain.advance(result, SETTINGS)


def test_at_stage_0_counts_what_was_leased_to_whom_lists_it_and_nothing_else_is_used_up() -> None:
    chain = StageChain.begin(_genesis(), SETTINGS)
    own = {peer: chain.leases.ids_of(peer) for peer in PEERS[:3]}
    everything = (*(_work(number) for peer in PEERS[:3] for number in own[peer][:4]), _work(1 << 20))
    work = {PEERS[0]: (_work(own[PEERS[0]][0]),), PEERS[1]: (_work(own[PEERS[1]][0]),), PEERS[2]: everything}
    result = _result(chain, work)
    assert chain.weights_of(result.roster, SETTINGS) == {PEERS[0]: 8, PEERS[1]: 8, PEERS[2]: 32}
    after = chain.advance(result, SETTINGS).leases
    assert after.consumed == 6
    assert own[PEERS[0]][1] in after.ids_of(PEERS[0])


def test_the_ids_of_a_contribution_that_reached_nobody_are_not_consumed() -> None:
    chain = StageChain.begin(_genesis(), SETTINGS)
    lost, kept = (chain.leases.ids_of(peer)[0] for peer in PEERS[:2])
    result = _result(chain, {PEERS[0]: (_work(lost),), PEERS[1]: (_work(kept),)}, unheard=(PEERS[0],))
    after = chain.advance(result, SETTINGS)
    assert lost in after.leases.ids_of(PEERS[0])
    assert kept not in after.leases.ids_of(PEERS[1])
    assert after.leases.consumed == 1


def test_a_result_that_starts_elsewhere_is_a_fork() -> None:
    chain = StageChain.begin(_genesis(), SETTINGS)
    good = _result(chain, {})
    other = StageChain.begin(replace(_genesis(), state_digest=bytes(32)), SETTINGS)
    later = chain.advance(good, SETTINGS)
    for wrong in (
        _result(other, {}),
        _result(later, {}),
        replace(good, roster=replace(good.roster, step=Step(5))),
        replace(good, roster=replace(good.roster, members=PEERS[:2])),
    ):
        with pytest.raises(RemoteError) as caught:
            chain.advance(wrong, SETTINGS)
        assert caught.value.kind == "fork"


def test_the_genesis_bytes_never_change() -> None:
    identity = Identity.from_seed(bytes(range(32)))
    order_free = LeaseTable.from_value(
        {"next_chunk": 2, "consumed": 5, "held": [["", [[0, 5, 8]]], [identity.peer_id, [[1, 8, 16]]]]}
    )
    genesis = replace(_genesis(members=(identity.peer_id,)), leases=order_free)
    signed = replace(genesis, signature=identity.sign(genesis.signed_bytes()))
    assert Genesis.from_value(unpack(pack(signed.to_value()), max_bytes=1 << 16)) == signed
    assert (
        hashlib.sha256(genesis.signed_bytes()).hexdigest()
        == "7a57d0ea790dbd379e516748d11fcb6b6899f0a9a0fc6c8e0e928696213a8d99"
    )
    assert genesis.name.hex() == "de3a0fcc6b0631d739a63d72c3de03a5d36363d4572b51401383d9aef519212d"


def test_no_field_of_a_genesis_can_change_without_its_name() -> None:
    genesis = _genesis()
    others = [
        replace(genesis, run_id="other"),
        replace(genesis, stage=StageIndex(1)),
        replace(genesis, version=Version(5)),
        replace(genesis, state_digest=bytes(32)),
        replace(genesis, members=PEERS[:2]),
        replace(genesis, leases=LeaseTable(1)),
        replace(genesis, host=PeerId("other host")),
        replace(genesis, run_key=PeerId("other key")),
        replace(genesis, neighbours=NEAR[:1]),
        replace(genesis, host_chain_end=bytes(range(32))),
        replace(genesis, era=1),
        replace(genesis, work=(3, 4, 5)),
        replace(genesis, amendments=1),
    ]
    assert len({genesis.name, *(other.name for other in others)}) == 1 + len(others)
    assert len(others) == len(fields(Genesis)) - 1  # all but the signature


def test_few_members_vote_with_the_neighbours_their_last_roster_named() -> None:
    chain = StageChain.begin(_genesis(), SETTINGS)
    assert _voters(chain) == tuple(sorted([*PEERS[:3], *NEAR, HOST]))
    near = (PeerId("near 2"),)
    chain = chain.advance(_result(chain, {}, leaves=(PEERS[0],), neighbours=near), SETTINGS)
    assert _voters(chain) == tuple(sorted([*PEERS[1:3], *near, HOST]))
    chain = chain.advance(_result(chain, {}, joins=PEERS[3:5], neighbours=near), SETTINGS)
    assert _voters(chain) == tuple(sorted([*PEERS[1:3], *near, HOST])), "two have done nothing yet"
    for _ in range(3):
        works = {peer: (_work(chain.leases.ids_of(peer)[0]),) for peer in chain.members}
        chain = chain.advance(_result(chain, works, neighbours=near), SETTINGS)
    assert _voters(chain) == tuple(sorted([*PEERS[1:5], HOST]))  # four need nobody else
    assert (chain.host, chain.run_key) == (HOST, RUN_KEY)


def test_the_round_after_a_version_starts_from_what_its_name_binds() -> None:
    chain = StageChain.begin(_genesis(), SETTINGS)
    chain = chain.advance(_result(chain, {}, joins=(PEERS[3],)), SETTINGS)
    facts = chain.facts(SETTINGS, num_parts=2, phase_s=1.5)
    assert (facts.run_id, facts.stage, facts.step) == ("run", StageIndex(0), Step(5))
    assert (facts.members, facts.previous_name) == (chain.members, chain.name)
    assert facts.leaders == chain.leaders(Step(chain.version))
    assert (facts.run_key, facts.num_parts, facts.phase_s) == (RUN_KEY, 2, 1.5)
    for other in (
        replace(chain.basis, members=PEERS[:2], work=(16, 16), links=chain.basis.links[:2]),
        replace(chain.basis, work=chain.basis.work[::-1]),
        replace(chain.basis, neighbours=()),
        replace(chain.basis, previous_members=PEERS[:1]),
        replace(chain.basis, previous_work=(1,)),
        replace(chain.basis, late=PEERS[:1]),
        replace(chain.basis, previous_late=PEERS[:1]),
        replace(chain.basis, root=bytes(32)),
        replace(chain.basis, previous_name=bytes(32)),
        replace(chain.basis, links=(link_of(PEERS[0], 4), *chain.basis.links[1:])),
        replace(chain.basis, said=said_by(HOST_CHAIN, 4)),
    ):
        assert other.name != chain.name


def _voters(chain: StageChain) -> tuple[PeerId, ...]:
    return chain.facts(SETTINGS, num_parts=1, phase_s=1.0).voters


def _chain_value(**changes: Value) -> Value:
    """The value of a chain, with these of its fields or of its basis changed."""
    value = StageChain.begin(_genesis(stage=1), SETTINGS).to_value()
    assert isinstance(value, dict)
    names = ("previous_name", "root", "previous_members", "previous_work", "members", "work")
    names = (*names, "neighbours", "links", "said", "previous_late", "late")
    listed = value["basis"]
    assert isinstance(listed, list)
    basis = [changes.pop(name, held) for name, held in zip(names, listed, strict=True)]
    return {**value, "basis": basis, **changes}


def test_what_members_and_the_host_revealed_goes_into_the_next_basis_and_leavers_are_forgotten() -> None:
    chain = StageChain.begin(_genesis(stage=1), SETTINGS)
    assert chain.basis.link_of == {}
    assert chain.basis.said == said_by(HOST_CHAIN, 0)
    chain = chain.advance(_result(chain, {peer: (_work(at),) for at, peer in enumerate(PEERS[:2])}), SETTINGS)
    assert chain.basis.link_of == {peer: link_of(peer, 4) for peer in PEERS[:2]}
    assert chain.basis.said == said_by(HOST_CHAIN, 4)
    chain = chain.advance(_result(chain, {PEERS[0]: (_work(9),)}, leaves=(PEERS[1],), joins=PEERS[3:4]), SETTINGS)
    assert chain.members == (PEERS[0], PEERS[2], PEERS[3])
    assert chain.basis.link_of == {PEERS[0]: link_of(PEERS[0], 5)}
    chain = chain.advance(_result(chain, {}), SETTINGS)
    assert (chain.basis.link_of, chain.basis.said) == ({PEERS[0]: link_of(PEERS[0], 5)}, said_by(HOST_CHAIN, 5))


@pytest.mark.parametrize(
    "changes",
    [
        {"members": []},
        {"previous_members": []},
        {"previous_work": [1]},
        {"late": [PEERS[0]]},
        {"late": [PEERS[3]]},
        {"previous_late": [PEERS[1], PEERS[0]]},
        {"work": [16, 16]},
        {"work": [16, 16, 17]},
        {"recent_work": []},
        {"recent_work": [["peer 0", [1] * 17]]},
        {"members": ["b", "a"]},
        {"members": ["a", "a"]},
        {"previous_members": ["b", "a"]},
        {"members": [f"{number:03}" for number in range(MAX_MEMBERS + 1)]},
        {"neighbours": [f"{number:03}" for number in range(65)]},
        {"root": b"short"},
        {"links": []},
        {"links": [None, None, [3]]},
        {"links": [None, None, [3, b"short"]]},
        {"said": None},
        {"said": [-1, bytes(32)]},
        {"basis": []},
        {"basis": None},
        {"host": None},
        {"run_key": 1},
        {"lineage": b"short"},
        {"version": -1},
        {"more": 1},
    ],
)
def test_malformed_chains_are_refused(changes: dict[str, Value]) -> None:
    StageChain.from_value(_chain_value())
    with pytest.raises(RemoteError) as caught:
        StageChain.from_value(_chain_value(**changes))
    assert caught.value.kind == "malformed"


def test_a_genesis_without_members_is_refused() -> None:
    with pytest.raises(RemoteError):
        Genesis.from_value(replace(_genesis(members=()), signature=bytes(64)).to_value())
