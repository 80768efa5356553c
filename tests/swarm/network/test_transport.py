"""Both transports held to the one contract: over p2pd and in memory, the same calls and errors."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest

from swarm.core.errors import LocalError, RemoteError, TransientError, UnreachableError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.loop import new_event_loop
from swarm.network.memory import MemoryNetwork
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.service import ServiceLimits
from swarm.network.transport import MAX_META_BYTES, UNLIMITED, Message, Place, Transport

pytestmark = pytest.mark.processes

T = TypeVar("T")
MIB = 1 << 20
LIMITS = ServiceLimits(max_calls_per_method=3, max_calls_per_peer=5)
LOCAL = P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",), limits=LIMITS)


@dataclass
class World:
    """Two connected peers in one event loop, and how to make or end more of them."""

    run: Callable[[Awaitable[T]], T]
    new: Callable[[], Awaitable[Transport]]
    kill: Callable[[Transport], Awaitable[None]]
    a: Transport
    b: Transport


@pytest.fixture(scope="module", params=["memory", "p2p"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    network = MemoryNetwork(random.Random(1), limits=LIMITS)
    made: list[Transport] = []

    async def new() -> Transport:
        identity = Identity.generate()
        made.append(
            network.transport(identity) if request.param == "memory" else await P2PTransport.create(identity, LOCAL)
        )
        return made[-1]

    async def kill(transport: Transport) -> None:
        if isinstance(transport, P2PTransport):
            await transport.daemon.stop()
        else:
            network.kill(transport.peer_id)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        a, b = runner.run(new()), runner.run(new())
        runner.run(a.connect(b.peer_id, b.addresses()))
        yield World(runner.run, new, kill, a, b)
        for transport in made:
            runner.run(transport.close())
        assert asyncio.all_tasks(runner.get_loop()) == set()


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Poll until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions of all kinds
            await asyncio.sleep(0.002)


def ask(world: World, method: str, request: Message | None = None, **limits: float) -> Message:
    return world.run(call(world, method, request, **limits))


async def call(
    world: World,
    method: str,
    request: Message | None = None,
    *,
    timeout_s: float = 10.0,
    max_body_bytes: int = 64 * MIB,
) -> Message:
    return await world.a.call(
        world.b.peer_id, method, request or Message(), timeout_s=timeout_s, max_body_bytes=max_body_bytes
    )


@pytest.mark.parametrize("num_bytes", [0, 1, 65536, 65537, MIB, 3 * MIB + 17])
def test_call_carries_meta_and_body_both_ways(world: World, num_bytes: int) -> None:
    body = random.Random(num_bytes).randbytes(num_bytes)
    seen: list[tuple[PeerId, Message]] = []

    async def echo(peer_id: PeerId, request: Message) -> Message:
        seen.append((peer_id, request))
        return Message({"answer": [1, None, "two", b"\0", 2.5]}, request.body)

    world.b.serve("echo", echo, max_body_bytes=4 * MIB)
    reply = ask(world, "echo", Message({"n": num_bytes, "list": (1, 2)}, body))
    assert reply.meta == {"answer": [1, None, "two", b"\0", 2.5]}
    assert bytes(reply.body) == body
    ((caller, request),) = seen
    assert caller == world.a.peer_id
    assert request.meta == {"n": num_bytes, "list": [1, 2]}


def test_call_carries_buffers_of_any_format_and_keeps_no_hold_on_them(world: World) -> None:
    async def echo(_: PeerId, request: Message) -> Message:
        return Message({}, request.body)

    world.b.serve("echo", echo, max_body_bytes=MIB)
    data = bytearray(range(240))
    reply = ask(world, "echo", Message({}, memoryview(data).cast("d")))
    sent = bytes(data)
    data[:] = bytes(240)
    data.extend(b"resizable again")
    assert bytes(reply.body) == sent


def test_calls_of_both_directions_run_at_once(world: World) -> None:
    meeting = asyncio.Barrier(4)

    async def meet(_: PeerId, request: Message) -> Message:
        await meeting.wait()
        return Message(request.meta)

    world.a.serve("meet", meet, max_body_bytes=0)
    world.b.serve("meet", meet, max_body_bytes=0)

    async def main() -> list[Message]:
        there = [call(world, "meet", Message({"n": n})) for n in range(2)]
        back = [
            world.b.call(world.a.peer_id, "meet", Message({"n": n}), timeout_s=10, max_body_bytes=0) for n in (2, 3)
        ]
        return await asyncio.gather(*there, *back)

    assert [reply.meta["n"] for reply in world.run(main())] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("raised", "caught", "said"),
    [
        (TransientError("later"), TransientError, "later"),
        (UnreachableError("my neighbour is gone"), TransientError, "my neighbour is gone"),
        (LocalError("disk full"), TransientError, "disk full"),
        (RemoteError("digest", "digest \x1b[31m differs"), RemoteError, r"fail: digest \?\[31m differs"),
        (KeyError("secret"), TransientError, "^((?!secret).)*$"),
        (TimeoutError("secret"), TransientError, "^((?!secret).)*$"),
    ],
)
def test_error_of_a_handler_reaches_its_caller_as_agreed(
    world: World, raised: Exception, caught: type[Exception], said: str
) -> None:
    async def fail(_: PeerId, request: Message) -> Message:
        raise raised

    world.b.serve("fail", fail, max_body_bytes=0)
    with pytest.raises(caught, match=said) as info:
        ask(world, "fail")
    assert type(info.value) is caught
    if isinstance(info.value, RemoteError):
        assert (info.value.kind, info.value.peer_id) == ("digest", world.b.peer_id)


def test_error_of_enormous_length_is_cut(world: World) -> None:
    async def fail(_: PeerId, request: Message) -> Message:
        raise RemoteError("k" * 1000, "m" * MIB)

    world.b.serve("fail", fail, max_body_bytes=0)
    with pytest.raises(RemoteError) as info:
        ask(world, "fail")
    assert info.value.kind == "malformed"
    assert len(str(info.value)) < 2000


def test_unknown_method_is_transient(world: World) -> None:
    with pytest.raises(TransientError, match="nonsense is not served here") as info:
        ask(world, "nonsense", Message({}, bytes(3 * MIB)))
    assert not isinstance(info.value, UnreachableError)


def test_body_over_the_limit_is_refused_before_it_is_read(world: World) -> None:
    calls = []

    async def record(_: PeerId, request: Message) -> Message:
        calls.append(request)
        return Message()

    world.b.serve("small", record, max_body_bytes=100)
    received = world.b.traffic()[1]
    with pytest.raises(RemoteError, match="limit of 100") as info:
        ask(world, "small", Message({}, bytes(30 * MIB)))
    assert (info.value.kind, info.value.peer_id) == ("too_large", world.b.peer_id)
    assert calls == []
    assert world.b.traffic()[1] == received
    ask(world, "small", Message({}, bytes(100)))
    assert len(calls) == 1


def test_answer_over_the_callers_limit_is_the_peers_fault(world: World) -> None:
    async def big(_: PeerId, request: Message) -> Message:
        return Message({}, bytes(1001))

    world.b.serve("big", big, max_body_bytes=0)
    with pytest.raises(RemoteError, match="limit of 1000") as info:
        ask(world, "big", max_body_bytes=1000)
    assert (info.value.kind, info.value.peer_id) == ("too_large", world.b.peer_id)
    assert len(ask(world, "big", max_body_bytes=1001).body) == 1001


@pytest.mark.parametrize("meta", [{"huge": bytes(MAX_META_BYTES)}, {"not canonical": {1, 2}}])
def test_answer_that_cannot_be_sent_costs_one_call(world: World, meta: dict[str, bytes]) -> None:
    async def answer(_: PeerId, request: Message) -> Message:
        return Message(meta)  # type: ignore[arg-type]

    world.b.serve("answer", answer, max_body_bytes=0)
    with pytest.raises(TransientError):
        ask(world, "answer")


def test_deadline_ends_the_call_and_its_handler(world: World) -> None:
    ended = []

    async def hang(_: PeerId, request: Message) -> Message:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)
        raise AssertionError

    world.b.serve("hang", hang, max_body_bytes=0)

    async def main() -> float:
        start = asyncio.get_running_loop().time()
        with pytest.raises(UnreachableError, match=r"no answer to hang in 1(\.\d+)? s"):
            await call(world, "hang", timeout_s=1.0)
        waited = asyncio.get_running_loop().time() - start
        await until(lambda: ended)
        return waited

    assert 0.9 < world.run(main()) < 5.0


def test_cancelled_call_cancels_its_handler(world: World) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def hang(_: PeerId, request: Message) -> Message:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()
        raise AssertionError

    world.b.serve("hang", hang, max_body_bytes=0)

    async def main() -> None:
        task = asyncio.create_task(call(world, "hang", timeout_s=60))
        async with asyncio.timeout(30):
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await ended.wait()

    world.run(main())


@pytest.mark.parametrize("is_refused", [False, True])
def test_calls_in_turns_hold_theirs_until_the_answer_has_gone(world: World, is_refused: bool) -> None:
    lock, seen, lengths = asyncio.Lock(), list[str](), list[int]()

    @contextlib.asynccontextmanager
    async def turn(peer: PeerId, request: Message) -> AsyncIterator[Place]:
        assert (peer, request.meta) == (world.a.peer_id, {})
        async with lock:
            seen.append("turn")
            yield UNLIMITED._replace(will_go=lengths.append)
            seen.append("gone")

    async def answer(_: PeerId, request: Message) -> Message:
        seen.append("answered")
        await asyncio.sleep(0.01)
        return Message({}, bytes(3 * MIB))

    async def refuse(_: PeerId, request: Message) -> Message:
        raise TransientError("not now")

    async def main() -> None:
        world.b.serve("in turns", refuse if is_refused else answer, max_body_bytes=0)
        world.b.in_turns("in turns", turn)
        calls = [asyncio.create_task(call(world, "in turns")) for _ in range(3)]
        if is_refused:
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(one, TransientError) for one in answers)
        else:
            await until(lambda: "answered" in seen)
            calls.pop().cancel()  # it waits, or has its turn: neither keeps the others from theirs
            assert [len(one.body) for one in await asyncio.gather(*calls)] == [3 * MIB] * 2
            assert seen[:3] == ["turn", "answered", "gone"]
        assert all(3 * MIB <= length < 3 * MIB + 100 for length in lengths)
        assert bool(lengths) != is_refused
        await until(lambda: not lock.locked())

    world.run(main())


def test_calls_past_a_methods_limit_are_told_busy(world: World) -> None:
    gate = asyncio.Event()
    inside = []

    async def wait(_: PeerId, request: Message) -> Message:
        inside.append(True)
        await gate.wait()
        return Message()

    world.b.serve("wait", wait, max_body_bytes=0)

    async def main() -> None:
        held = [asyncio.create_task(call(world, "wait")) for _ in range(LIMITS.max_calls_per_method)]
        await until(lambda: len(inside) == LIMITS.max_calls_per_method)
        with pytest.raises(TransientError, match="busy") as info:
            await call(world, "wait")
        assert not isinstance(info.value, UnreachableError)
        gate.set()
        await asyncio.gather(*held)
        await call(world, "wait")

    world.run(main())


def test_calls_past_a_peers_limit_are_told_busy_and_others_are_not(world: World) -> None:
    gate = asyncio.Event()
    inside = []

    async def wait(_: PeerId, request: Message) -> Message:
        inside.append(True)
        await gate.wait()
        return Message()

    for method in ("one", "two"):
        world.b.serve(method, wait, max_body_bytes=0)

    async def main() -> None:
        methods = ["one"] * 3 + ["two"] * 2
        held = [asyncio.create_task(call(world, method)) for method in methods]
        await until(lambda: len(inside) == LIMITS.max_calls_per_peer)
        with pytest.raises(TransientError, match="busy"):
            await call(world, "two")
        third = await world.new()
        await third.connect(world.b.peer_id, world.b.addresses())
        other = asyncio.create_task(third.call(world.b.peer_id, "two", Message(), timeout_s=10, max_body_bytes=0))
        await until(lambda: len(inside) == LIMITS.max_calls_per_peer + 1)
        gate.set()
        await asyncio.gather(*held, other)
        await third.close()

    world.run(main())


@pytest.mark.parametrize("who_dies", ["callee", "caller"])
def test_death_of_a_peer_breaks_its_open_calls_at_once(world: World, who_dies: str) -> None:
    async def main() -> float:
        caller, callee = await world.new(), await world.new()
        await caller.connect(callee.peer_id, callee.addresses())
        started, ended = asyncio.Event(), asyncio.Event()

        async def hang(_: PeerId, request: Message) -> Message:
            started.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.set()
            raise AssertionError

        callee.serve("hang", hang, max_body_bytes=0)
        task = asyncio.create_task(caller.call(callee.peer_id, "hang", Message(), timeout_s=60, max_body_bytes=0))
        async with asyncio.timeout(30):
            await started.wait()
            start = asyncio.get_running_loop().time()
            await world.kill(callee if who_dies == "callee" else caller)
            with pytest.raises(UnreachableError):
                await task
            await ended.wait()
            waited = asyncio.get_running_loop().time() - start
        with pytest.raises(UnreachableError):
            await caller.call(callee.peer_id, "hang", Message(), timeout_s=10, max_body_bytes=0)
        await caller.close()
        await callee.close()
        return waited

    assert world.run(main()) < 5.0


def test_close_breaks_open_calls_and_cancels_handlers_quickly(world: World) -> None:
    async def main() -> float:
        third = await world.new()
        await third.connect(world.b.peer_id, world.b.addresses())
        await world.b.connect(third.peer_id, third.addresses())
        started, ended = [], []

        async def hang(peer_id: PeerId, request: Message) -> Message:
            started.append(peer_id)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append(peer_id)
            raise AssertionError

        third.serve("hang", hang, max_body_bytes=0)
        world.b.serve("hang", hang, max_body_bytes=0)
        calls = [
            asyncio.create_task(third.call(world.b.peer_id, "hang", Message(), timeout_s=60, max_body_bytes=0)),
            asyncio.create_task(world.b.call(third.peer_id, "hang", Message(), timeout_s=60, max_body_bytes=0)),
        ]
        await until(lambda: len(started) == 2)
        start = asyncio.get_running_loop().time()
        await third.close()
        waited = asyncio.get_running_loop().time() - start
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [UnreachableError, UnreachableError]
        await until(lambda: len(ended) == 2)
        await third.close()  # twice is harmless
        return waited

    assert world.run(main()) < 5.0


def test_peer_that_was_never_met_is_transient_and_no_peer_id_is_an_error(world: World) -> None:
    stranger = Identity.generate().peer_id

    async def main() -> None:
        with pytest.raises(UnreachableError):
            await world.a.call(stranger, "echo", Message(), timeout_s=5, max_body_bytes=0)
        with pytest.raises(RemoteError, match="no peer id"):
            await world.a.call(PeerId("nobody"), "echo", Message(), timeout_s=5, max_body_bytes=0)
        with pytest.raises(UnreachableError):
            await world.a.connect(stranger, ["/ip4/127.0.0.1/tcp/1"])

    world.run(main())


def test_addresses_name_the_peer_and_traffic_is_counted(world: World) -> None:
    async def sink(_: PeerId, request: Message) -> Message:
        return Message({}, bytes(10))

    world.b.serve("sink", sink, max_body_bytes=MIB)
    assert world.b.addresses()
    assert all(address.endswith(f"/p2p/{world.b.peer_id}") for address in world.b.addresses())
    before = world.a.traffic(), world.b.traffic()
    ask(world, "sink", Message({"x": 1}, bytes(100_000)))
    (sent, received), (peer_sent, peer_received) = [
        (now[0] - then[0], now[1] - then[1])
        for now, then in zip((world.a.traffic(), world.b.traffic()), before, strict=True)
    ]
    assert 100_000 <= sent < 100_200
    assert 100_000 <= peer_received < 100_200
    assert 10 <= received < 200
    assert 10 <= peer_sent < 200
