"""What came of peers that a demo made misbehave, in words: who was put out and why, or what is done against a lie."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bootstrap.demo.observed import Observed, Peer, short

STAYING: Mapping[str, str] = MappingProxyType(
    {
        "claimed_ids": "a list of which drawn entries have no papers is not counted, nor is its own work in it",
        "framing": "a header that names two birth records is refused; others do that work, later",
        "written_result": "everybody votes for a result as its parts' reducers signed them, and turns to the next "
        "leader if it is not",
        "grinding": "leaders take turns, and whatever is drawn goes by hash chains that nobody can write",
        "charges": "a charge puts nobody out until a jury or the host has seen its case, and fewer than 5 have no jury",
    }
)
"""Of attacks that put nobody out by themselves: what is done against them."""


def of_attacker(observed: Observed, peer: Peer, report: Mapping[str, Any]) -> str:
    """`report` is the host's: its books say what the peer was credited with."""
    assert peer.attack is not None
    out = observed.outs.get(peer.peer_id)
    if out is not None:
        said = f"{out.how} at step {out.step}, for {out.kind}"
    elif observed.version <= peer.attack.from_step:
        said = f"the run ended at step {observed.version}, before it began"
    elif peer.attack.kind in STAYING:
        said = f"stayed in: {STAYING[peer.attack.kind]}"
    else:
        said = "not put out so far: audits are drawn by chance"
    stage = {one.peer_id for one in observed.peers.values() if one.stage == peer.stage}
    credit = {name: tokens for name, tokens in report.get("credit", {}).items() if name in stage}
    if whole := sum(credit.values()):
        said += f"; it has {credit.get(peer.peer_id, 0) / whole:.0%} of the credit of stage {peer.stage}"
    return said


def honest_out(observed: Observed) -> list[str]:
    """Peers that were put out and never asked to misbehave, each in words."""
    found = []
    for peer_id, out in sorted(observed.outs.items()):
        if observed.peers[peer_id].attack is None:
            found.append(f"{short(peer_id)} was {out.how} at step {out.step}, for {out.kind}")
    return found
