"""A peer like any other, whose records and messages are changed on their way out as a plan says."""

import asyncio
import contextlib
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from unittest import mock

from benchmarks.red_team.mutations import Memory, changed, ways_of
from benchmarks.red_team.plan import Plan, Rule
from benchmarks.red_team.records import Kind, Site, declared, get, put, sites, slots_of
from benchmarks.red_team.virtual_swarm import MAX_MESSAGE_BYTES, PeerMaker, VirtualSwarm, owner
from peer.program.daemon import PeerDaemon
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Packed, Value, pack, signed_bytes, unpack
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.forms import Form, Integer, Items, Number
from swarm.core.ids import PeerId, Step
from swarm.core.record import Record, Row, Signed, SignedValue
from swarm.core.round.contribution import ReducedPart
from swarm.core.round.voting import Promise
from swarm.core.round.words import Reduction
from swarm.host_protocol import ACCUSE
from swarm.identity.key import Identity, verify
from swarm.network.transport import Handler, Message, Transport, TransportAround
from verification.kinds.equivocation import CastVote

MOST_DELAY_S = 8.0
KEPT_MESSAGES = 16
KEPT_RECORDS = 24
REMEMBERED = 0.2
"""Share of messages whose fields are kept, to be said again."""
_READING: ContextVar[bool] = ContextVar("reading", default=False)
"""Whether the record that is made now is read from a message."""


class Mutation:
    """What the liars of one run know and do, together."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.memory = Memory()
        self._remembers = random.Random(f"{plan.seed}/memory")
        self.records: deque[Any] = deque(maxlen=KEPT_RECORDS)
        """Signed ones, and siblings of such, as liars made them."""
        self.siblings: deque[Any] = deque(maxlen=KEPT_RECORDS)
        self.bodies: dict[bytes, bytes] = {}
        """What hashes to a digest that was named."""
        self.applied: dict[int, int] = {}
        """How often each rule was."""
        self._rngs = {rule.number: plan.chance(rule) for rule in plan.rules}
        self._made: dict[int, dict[Any, Any]] = {rule.number: {} for rule in plan.rules}
        self.liars: dict[PeerId, Identity] = {}
        self.daemons: dict[PeerId, PeerDaemon] = {}

    def rng(self, rule: Rule) -> random.Random:
        return self._rngs[rule.number]

    def step_of(self, liar: PeerId | None) -> int:
        daemon = self.daemons.get(liar) if liar is not None else None
        return int(daemon.at.steps.version) if daemon is not None and daemon.at is not None else 0

    def due(self, where: str, liar: PeerId | None) -> Iterator[Rule]:
        """Rules that act now, those that chance leaves out this time left out."""
        step = self.step_of(liar)
        for rule in self.plan.rules:
            if rule.where == where and rule.acts_at(step) and self.rng(rule).random() < rule.share:
                yield rule

    def did(self, rule: Rule) -> None:
        self.applied[rule.number] = self.applied.get(rule.number, 0) + 1

    def keep_body(self, body: bytes) -> None:
        if len(self.bodies) < 4096:
            self.bodies[hashlib.sha256(body).digest()] = body
            self.bodies[bulk_digest(body)] = body

    # -- records as they are made -------------------------------------------------------------------------

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Liars' programs make some records otherwise than they mean to, and believe them."""
        wanted = {rule.kind for rule in self.plan.rules if rule.where == "made"}
        if any(rule.way == "sibling" for rule in self.plan.rules):
            wanted |= {kind.__name__ for kind in declared() if issubclass(kind, Signed)}
        with contextlib.ExitStack() as stack:
            for base in (Record, Row, SignedValue):
                stack.enter_context(mock.patch.object(base, "from_value", _reading(base)))
            for kind in declared():
                if kind.__name__ in wanted:
                    stack.enter_context(mock.patch.object(kind, "__init__", self._making(kind)))
            yield

    def _making(self, kind: Kind) -> Callable[..., None]:
        make = kind.__init__

        def made(record: Any, *items: Any, **fields: Any) -> None:
            make(record, *items, **fields)
            liar = owner()
            if liar not in self.liars or _READING.get():
                return
            for rule in self.due("made", liar):
                if rule.kind == kind.__name__:
                    self._remake(rule, record)
            if isinstance(record, Signed) and record.signature and callable(getattr(record, "digest", None)):
                self.records.append(record)

        return made

    def _remake(self, rule: Rule, record: Any) -> None:
        """One field of a record that was just made. What it was changed into before, it stays and becomes again."""
        found = next(
            ((attribute, form) for name, attribute, form in slots_of(type(record)) if name == rule.field), None
        )
        if found is None:
            return
        attribute, form = found
        held = getattr(record, attribute)
        known = self._made[rule.number]
        with contextlib.suppress(TypeError):  # what cannot be hashed is left alone
            if held not in known:
                new = self.change(rule, type(record), attribute, form, held)
                known[held] = new
                known.setdefault(new, new)
            if known[held] != held:
                object.__setattr__(record, attribute, known[held])
                self.did(rule)

    def change(self, rule: Rule, kind: Kind, attribute: str, form: Form, held: Any) -> Any:
        """What the attribute becomes; what it is where nothing well formed can be made."""
        rng = self.rng(rule)
        if rule.way == "inner" and isinstance(form, Items) and held and hasattr(held[0], "KIND"):
            chosen = set(range(len(held))) if rng.random() < 0.3 else {rng.randrange(len(held))}
            slots = slots_of(type(held[0]))
            weights = [3 if isinstance(form, Integer | Number) else 1 for _, _, form in slots]
            _, inner_attribute, inner = rng.choices(slots, weights)[0]
            ways = [way for way in ways_of(inner) if way != "inner"]
            inner_rule = replace(rule, way=rng.choice(ways))
            return tuple(
                replace(
                    one,
                    **{
                        inner_attribute: self.change(
                            inner_rule, type(one), inner_attribute, inner, getattr(one, inner_attribute)
                        )
                    },
                )
                if at in chosen
                else one
                for at, one in enumerate(held)
            )
        write = form.writer(shallow=False)
        value = write(held) if write is not None else held
        new = changed(
            rule.way,
            form,
            value,
            kind=kind,
            wire_name=_wire_name(kind, attribute),
            memory=self.memory,
            sibling=self.sibling,
            rng=rng,
        )
        try:
            return form.read(new, attribute) if new != value else held
        except RemoteError:
            return held

    def sibling(self, digest: bytes, rng: random.Random) -> bytes | None:
        """Of a record that a liar signed: of the same, with another digest in it, signed too; else of any other."""
        record = next((one for one in self.records if _digest_of(one) == digest), None)
        if record is None:
            return None
        key = self.liars.get(_signer_of(record, self.liars))
        if key is None:
            return None
        of_digests = [slot for slot in slots_of(type(record)) if slot[0].endswith("_digest")]
        _, attribute, _ = rng.choice(of_digests or list(slots_of(type(record))))
        before = [
            getattr(one, attribute)
            for one in self.records
            if type(one) is type(record) and getattr(one, attribute) != getattr(record, attribute)
        ]
        if not before:
            return None
        made = replace(record, **{attribute: rng.choice(before)}, signature=b"").signed_by(key)
        self.siblings.append(made)
        return _digest_of(made)

    # -- messages -----------------------------------------------------------------------------------------

    def spoken(self, meta: dict[str, Value], liar: PeerId) -> dict[str, Value]:
        """What a liar sends instead."""
        due = list(self.due("sent", liar))
        if not due and self._remembers.random() > REMEMBERED:
            return meta
        value = unpack(pack(meta), max_bytes=MAX_MESSAGE_BYTES)
        assert isinstance(value, dict)
        found = sites(value)
        self.memory.keep(value, found, is_mine=True)
        for rule in due:
            matching = [site for site in found if site.kind.__name__ == rule.kind]
            if matching:
                self._respeak(rule, value, found, self.rng(rule).choice(matching), liar)
        return value

    def heard(self, meta: dict[str, Value]) -> None:
        """Of what others say, a part is remembered."""
        if self._remembers.random() < REMEMBERED:
            self.memory.keep(meta, sites(meta), is_mine=False)

    def _respeak(self, rule: Rule, value: dict[str, Value], found: Sequence[Site], site: Site, liar: PeerId) -> None:
        key = self.liars[liar]
        around = [
            one
            for one in found
            if one.path == site.path[: len(one.path)]
            and issubclass(one.kind, Signed)
            and _is_signed_by(liar, one, value)
        ]
        form = next(form for name, _, form in slots_of(site.kind) if name == rule.field)
        where = site.field(rule.field)
        try:
            held = get(value, where)
        except (KeyError, IndexError, TypeError):
            return
        new = changed(
            rule.way,
            form,
            held,
            kind=site.kind,
            wire_name=rule.field,
            memory=self.memory,
            sibling=self.sibling,
            rng=self.rng(rule),
        )
        if new == held:
            return
        put(value, where, new)
        self.did(rule)
        for one in reversed(around):
            _sign_again(key, one, value)
        self._sign_what_is_said(key, liar, value)

    def _sign_what_is_said(self, key: Identity, liar: PeerId, value: dict[str, Any]) -> None:
        """What is signed in other words than the message has: votes, promises and reduced parts."""
        daemon = self.daemons[liar]
        if daemon.at is None:
            return
        steps = daemon.at.steps
        chain = steps.chain
        about: list[Value] = [chain.run_id, int(chain.stage), int(value.get("step") or 0), chain.name, b""]
        with contextlib.suppress(KeyError, TypeError, RemoteError, AssertionError, IndexError, StopIteration):
            if value.get("kind") == "vote":
                said = [*about, value["phase"], value["view"], value["value"]]
                value["vote"][1] = key.sign(signed_bytes(CastVote.DOMAIN, said))
            promise = value.get("promise")
            if isinstance(promise, dict):
                unsigned = {name: one for name, one in promise.items() if name != "signature"}
                promise["signature"] = key.sign(signed_bytes(Promise.DOMAIN, [*about, unsigned]))
            for head in value.get("heads", ()):
                if "reduced" in head and head["reducer"] == liar:
                    reduced = ReducedPart.from_value(head["reduced"])
                    state = steps.open_step(Step(value["step"]))
                    assert state is not None
                    assert state.round is not None
                    assert state.round.roster is not None
                    roster = state.round.roster
                    made = Reduction.of(
                        roster,
                        reduced,
                        chain.weights_of(roster, steps.context.settings),
                        norm_cap=steps.replica.norm_cap(),
                        reducer=liar,
                    )
                    head["signature"] = key.sign(made.signed_bytes())


class MutantTransport(TransportAround):
    """Says what the peer behind it says, and hears what it hears, but for what the plan has."""

    def __init__(self, inner: Transport, mutation: Mutation, swarm: VirtualSwarm) -> None:
        super().__init__(inner)
        self._mutation = mutation
        self._swarm = swarm
        self._sent: dict[str, deque[Message]] = {}

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def answered(sender: PeerId, request: Message) -> Message:
            self._mutation.heard(request.meta)
            for rule in self._mutation.due("message", self.peer_id):
                if rule.kind in ("", method) and rule.deed in ("drop", "withhold"):
                    self._mutation.did(rule)
                    raise TransientError("not now")
                if rule.kind in ("", method) and rule.deed == "delay":
                    self._mutation.did(rule)
                    await asyncio.sleep(self._mutation.rng(rule).random() * MOST_DELAY_S)
            reply = await handler(sender, request)
            return replace(reply, meta=self._mutation.spoken(dict(reply.meta), self.peer_id))

        self._inner.serve(method, answered, max_body_bytes=max_body_bytes)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        body = b"".join(bytes(piece) for piece in (request.body, *request.more))
        if method == "forward":
            self._keep_bodies(body)
        if method == ACCUSE:  # its own bytes, in pieces
            return await self._send(peer_id, method, request, timeout_s, max_body_bytes)
        request = replace(request, meta=self._mutation.spoken(dict(request.meta), self.peer_id))
        for rule in self._mutation.due("message", self.peer_id):
            if rule.kind not in ("", method) or rule.deed == "withhold":
                continue
            self._mutation.did(rule)
            rng = self._mutation.rng(rule)
            match rule.deed:
                case "drop":
                    raise UnreachableError(f"{peer_id}: cannot be reached")
                case "delay":
                    await asyncio.sleep(rng.random() * MOST_DELAY_S)
                case "old":
                    request = rng.choice(list(self._sent.get(method, ())) or [request])
                case "repeat":
                    with contextlib.suppress(RemoteError, TransientError):
                        await self._send(peer_id, method, request, timeout_s, max_body_bytes)
                case "misdirect":
                    others = sorted(one.peer_id for one in self._swarm.peers if one.peer_id != self.peer_id)
                    with contextlib.suppress(RemoteError, TransientError):
                        await self._send(rng.choice(others), method, request, timeout_s, max_body_bytes)
                case _:
                    pass
        self._sent.setdefault(method, deque(maxlen=KEPT_MESSAGES)).append(request)
        return await self._send(peer_id, method, request, timeout_s, max_body_bytes)

    async def _send(
        self, peer_id: PeerId, method: str, request: Message, timeout_s: float, max_body_bytes: int
    ) -> Message:
        packed: Any = Packed(request.meta)  # once: it may be long
        if len(packed.data) > MAX_MESSAGE_BYTES:
            raise RemoteError("too_large", "longer than any message may be")
        said = replace(request, meta=packed)
        reply = await self._inner.call(peer_id, method, said, timeout_s=timeout_s, max_body_bytes=max_body_bytes)
        self._mutation.heard(reply.meta)
        return reply

    def _keep_bodies(self, body: bytes) -> None:
        num_targets = 4 * self._swarm.run.settings.microbatch_tokens
        self._mutation.keep_body(body[:-num_targets])
        self._mutation.keep_body(body[-num_targets:])


class MutantMaker(PeerMaker):
    """Makes the liars of a run."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def make(self, swarm: VirtualSwarm, stage: int, index: int, identity: Identity, **given: Any) -> PeerDaemon:
        self._mutation.liars[identity.peer_id] = identity
        transport = MutantTransport(swarm.network.transport(identity), self._mutation, swarm)
        directory = swarm.network.directory(identity)
        daemon = PeerDaemon(given.pop("volunteer"), identity, transport, directory, swarm.host_id, **given)
        self._mutation.daemons[identity.peer_id] = daemon
        return daemon


def _wire_name(kind: Kind, attribute: str) -> str:
    return next(name for name, held, _ in slots_of(kind) if held == attribute)


def _digest_of(record: Any) -> bytes | None:
    found = record.digest()
    return found if isinstance(found, bytes) else None


def _signer_of(record: Any, liars: dict[PeerId, Identity]) -> PeerId:
    return next((peer for peer in liars if verify(peer, record.signed_bytes(), record.signature)), PeerId(""))


def _reading(base: type[Any]) -> Any:
    read = base.__dict__["from_value"].__func__

    def from_value(cls: type[Any], value: Value) -> Any:
        if _READING.get():  # a record within a record
            return read(cls, value)
        token = _READING.set(True)
        try:
            return read(cls, value)
        finally:
            _READING.reset(token)

    return classmethod(from_value)


def _is_signed_by(liar: PeerId, site: Site, value: Value) -> bool:
    try:
        record = site.kind.from_value(get(value, site.path))
        return verify(liar, record.signed_bytes(), record.signature)
    except RemoteError:
        return False


def _sign_again(key: Identity, site: Site, value: Value) -> None:
    held = get(value, site.path)
    try:
        held["signature"] = site.kind.from_value(held).signed_by(key).signature
    except RemoteError:
        if issubclass(site.kind, SignedValue):
            with contextlib.suppress(TypeError):
                held["signature"] = key.sign(signed_bytes(site.kind.DOMAIN, held["value"]))
