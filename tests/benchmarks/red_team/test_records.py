"""Records, found wherever they are declared and wherever they stand in a message."""

import importlib
import pkgutil
from dataclasses import is_dataclass

import peer
import swarm
import verification
from benchmarks.red_team.records import BASES, PACKAGES, declared, get, sites
from swarm.core.canonical import Value
from swarm.core.record import Record, Row
from swarm.core.round.contribution import Rate
from swarm.identity.key import Identity
from verification.audit.verdicts import Debt

OTHER_PROCESSES = ("swarm.network.p2pd", "swarm.proto", "peer.fleet", "peer.sim", "peer.adversary")
"""Not loaded to look for records: they have none, and some share no process with others."""


def below(kind: type[object]) -> set[type[object]]:
    return {kind}.union(*(below(one) for one in kind.__subclasses__()))


def test_every_record_of_the_program_is_known() -> None:
    for package in (swarm, verification, peer):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.startswith(OTHER_PROCESSES) and not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    kinds = {kind for kind in below(Record) | below(Row) if is_dataclass(kind) and kind not in BASES}
    ours = {kind for kind in kinds if kind.__module__.startswith(PACKAGES) and not kind.__name__.startswith("_")}
    assert {kind.__name__ for kind in ours} == {kind.__name__ for kind in declared()}


def test_a_record_is_found_by_its_fields_and_within_others() -> None:
    debt = Debt("run", Identity.from_seed(bytes(32)).peer_id, 3).signed_by(Identity.from_seed(bytes(32)))
    message: Value = {"kind": "x", "held": [{"debt": debt.to_value()}], "rate": Rate(debt.peer_id, 3).to_value()}
    found = {site.kind.__name__: site for site in sites(message)}
    assert set(found) == {"Debt", "Rate"}
    assert get(message, found["Debt"].field("version")) == 3
    assert get(message, found["Rate"].field("octave")) == 3
