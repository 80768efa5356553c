"""A peer's token files come piece by piece from whoever has them: each piece is checked, liars are asked no more."""

import asyncio
import contextlib
import datetime
import hashlib
import ipaddress
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import peer.state.run_files
from peer.directory.host import Host
from peer.directory.limited_transport import LimitedTransport
from peer.directory.line import Line
from peer.state.downloads import Downloads, HeldFile
from peer.state.run_files import RunFiles
from swarm.cli import ExitCode, run
from swarm.core.errors import LocalError, TransientError
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.data.piece_store import PieceFolder, WholeFile
from swarm.data.pieces import PIECE_BYTES, PieceList, list_pieces
from swarm.file_donor import FileDonor
from swarm.host_protocol import FILE
from swarm.network.memory import MemoryNetwork, MemoryTransport
from swarm.network.services.mirror import MirrorClient
from swarm.network.transport import Handler, Message
from tests.swarm_in_process import identity_of, manifest_of, swarm_in_process
from tests.verification.exhibits import small_settings

HOST, ME, HONEST, LIAR, OTHER = (identity_of(number) for number in range(5))
NUM_PIECES = 6


class Scene:
    """A host with two token files, and a peer without."""

    def __init__(self, folder: Path, mirrors: Sequence[str] = (), download_mbit: float | None = None) -> None:
        self.network = MemoryNetwork(random.Random(0))
        self.served = Counter[PeerId]()
        self.mirrors = mirrors
        self.bytes: list[bytes] = []
        self.files: dict[bytes, WholeFile] = {}
        sizes = {"train": NUM_PIECES * PIECE_BYTES - 1000, "held_out": 5000}
        for name, size in sizes.items():
            path = folder / f"{name}.tokens"
            self.bytes.append(random.Random(name).randbytes(size))
            path.write_bytes(self.bytes[-1])
            pieces = list_pieces(path)
            self.files[pieces.digest] = WholeFile(path, pieces)
        self.train, self.held_out = self.files
        data = replace(
            small_settings(2).data,
            token_bytes=1,
            num_train_tokens=sizes["train"],
            num_held_out_tokens=sizes["held_out"],
            train_digest=self.train,
            held_out_digest=self.held_out,
        )
        self.settings: RunSettings = replace(small_settings(2), data=data)
        self.host = self.network.transport(HOST)
        self.donate(self.host)
        (folder / "peer").mkdir()
        self.own = self.network.transport(ME)
        self.limited = LimitedTransport(self.own, Line(download_mbit=download_mbit))
        self.donors: tuple[PeerId, ...] = ()
        self.num_lookups = 0
        self.run_files = RunFiles(
            settings=self.settings,
            host=Host(self.limited, HOST.peer_id),
            transport=self.limited,
            limited=self.limited,
            folder=folder / "peer",
            donors=self._donors,
            downloads=Downloads(),
        )

    async def _donors(self) -> Sequence[PeerId]:
        self.num_lookups += 1
        return self.donors

    def donate(self, transport: MemoryTransport, *, lies: bool = False, files: Any = None) -> PeerId:
        """Have the transport serve the files, in truth or not."""
        donor = FileDonor(files or self.files, self.mirrors)
        donor.serve(transport)

        async def counted(sender: PeerId, request: Message) -> Message:
            self.served[transport.peer_id] += 1
            await asyncio.sleep(0.001)  # so that all have their turn
            answer = await donor._on_file(sender, request)
            return Message({}, bytes(len(answer.body))) if lies else answer

        transport.serve(FILE, counted, max_body_bytes=0)
        return transport.peer_id

    async def get(self, *donors: PeerId, pieces: Collection[int] = range(NUM_PIECES)) -> HeldFile:
        """The training file, with these pieces."""
        self.donors = donors
        train, held_out = await self.run_files.open()
        await self.run_files.fetch(train, pieces)
        await self.run_files.fetch(held_out, [0])
        for index in pieces:
            assert train.folder.piece(index) == self.bytes[0][index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
        return train


def test_who_holds_up_the_last_piece_is_given_up_and_not_asked_soon_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.state.run_files, "LATE_S", 0.05)
    begun = list[int]()

    async def never(sender: PeerId, request: Message) -> Message:
        begun.append(len(begun))
        await asyncio.sleep(3600)
        return Message()

    async def main() -> None:
        scene = Scene(tmp_path)
        liar = scene.network.transport(LIAR)
        scene.donate(liar)
        liar.serve(FILE, never, max_body_bytes=0)
        async with asyncio.timeout(peer.state.run_files.PIECE_S / 2):
            train = await scene.get(liar.peer_id, pieces=range(3))
            await scene.run_files.fetch(train, range(3, NUM_PIECES))
        assert len(begun) == 1
        assert scene.num_lookups == 1

    asyncio.run(main())


def test_pieces_come_from_all_who_have_them_and_a_liar_is_asked_once(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        honest = scene.donate(scene.network.transport(HONEST))
        liar = scene.donate(scene.network.transport(LIAR), lies=True)
        train = await scene.get(liar, honest)
        assert scene.served[liar] == 2  # once for each file
        assert scene.served[honest] > 0
        assert scene.served[HOST.peer_id] > 0
        assert scene.served.total() == NUM_PIECES + 1 + scene.served[liar]
        across = train.folder.read(2 * PIECE_BYTES - 5, 4 * PIECE_BYTES + 5)
        assert across.tolist() == list(scene.bytes[0][2 * PIECE_BYTES - 5 : 4 * PIECE_BYTES + 5])
        # Whoever has them gives them on.
        other = await scene.network.transport(LIAR).call(
            *(ME.peer_id, FILE, Message({"digest": scene.train, "piece": 1})), timeout_s=5, max_body_bytes=PIECE_BYTES
        )
        assert bytes(other.body) == scene.bytes[0][PIECE_BYTES : 2 * PIECE_BYTES]

    asyncio.run(main())


def test_only_what_is_wanted_comes_and_what_is_not_needed_goes(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        train = await scene.get(pieces=[4, 1])
        assert (train.folder.held(), scene.served.total()) == ([1, 4], 3)
        with pytest.raises(LocalError, match=r"piece 2 of .* is not here"):
            train.folder.read(PIECE_BYTES, 2 * PIECE_BYTES + 1)
        await scene.run_files.fetch(train, [0, 2])
        train.folder.forget(ME.peer_id, [1], most=2)
        assert train.folder.held() == [0, 1, 2], "the others that were needed last"
        folder = tmp_path / "peer" / train.folder.name
        assert PieceFolder(folder, train.folder.pieces, 1).held() == [0, 1, 2], "an earlier process's are taken up"
        (folder / "2").write_bytes(b"damaged")
        (folder / "5.partial").write_bytes(b"broken off")
        assert PieceFolder(folder, train.folder.pieces, 1).held() == [0, 1]
        assert len(list(folder.iterdir())) == 2

    asyncio.run(main())


def test_peers_do_without_the_host_and_nobody_is_needed_for_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.directory.host.HOST_RETRY_S", 0.0)

    async def main() -> None:
        scene = Scene(tmp_path)
        scene.network.kill(HOST.peer_id)
        with pytest.raises(TransientError):
            await scene.get()
        some = PieceFolder(tmp_path / "some", scene.files[scene.train].pieces, 1)
        for index in (0, 3):
            some.put(index, scene.bytes[0][index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
        few = scene.donate(scene.network.transport(HONEST), files={**scene.files, scene.train: some})
        with pytest.raises(TransientError, match="nobody gives the last 4 of 6 pieces"):
            await scene.get(few)
        assert scene.served == {few: 2}, "a peer is asked for what it says it has"
        await scene.get(few, scene.donate(scene.network.transport(LIAR)))
        scene.network.kill(few)
        scene.network.kill(LIAR.peer_id)
        await scene.get()

    asyncio.run(main())


def test_without_the_host_a_list_counts_that_the_settings_name_and_mirrors_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.directory.host.HOST_RETRY_S", 0.0)

    async def main() -> None:
        scene = Scene(tmp_path, mirrors=["https://127.0.0.1:1/data"])
        scene.network.kill(HOST.peer_id)
        other = PieceFolder(tmp_path / "other", PieceList(PIECE_BYTES, bytes(32)), 1)
        liar = scene.donate(scene.network.transport(LIAR), files=dict.fromkeys(scene.files, other))
        with pytest.raises(TransientError):
            await scene.get(liar)
        assert not scene.served
        monkeypatch.setattr(MirrorClient, "read", None)
        await scene.get(liar, scene.donate(scene.network.transport(HONEST)))

    asyncio.run(main())


def test_a_late_peer_takes_its_tokens_from_peers_and_gives_them_on(tmp_path: Path) -> None:
    async def main() -> None:
        manifest = manifest_of(optimizer={"total_steps": 500}, checkpoint={"every_steps": 500})
        async with swarm_in_process(manifest, tmp_path, peers=(1, 1)) as swarm:
            await swarm.until_version(2)
            asked = Counter[PeerId]()
            for peer in (*(peer.transport for peer in swarm.of_stage(0)), swarm._opened[0]):
                services = peer._services._services  # type: ignore[attr-defined]
                counted = counting(asked, peer.peer_id, services[FILE].handler, swarm.run.settings.data.train_digest)
                services[FILE] = replace(services[FILE], handler=counted)
            late = await swarm.add_peer(0)
            async with asyncio.timeout(60):
                while not asked.total():
                    assert not late.task.done(), late.task.result()
                    await asyncio.sleep(0.02)
            assert +asked == {swarm.of_stage(0)[0].peer_id: 1}, "of the peer that has it"

    asyncio.run(main())


def counting(asked: Counter[PeerId], peer: PeerId, handler: Handler, digest: bytes) -> Handler:
    """Counts who is asked for pieces of the file."""

    async def counted(sender: PeerId, request: Message) -> Message:
        asked[peer] += request.meta["digest"] == digest
        return await handler(sender, request)

    return counted


# -- mirrors ------------------------------------------------------------------------------------------------


def trusted_certificate(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server at 127.0.0.1, and of a client that trusts it."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mirror")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "mirror.pem"
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem.write_bytes(key.private_bytes(*plain) + made.public_bytes(serialization.Encoding.PEM))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    return server, ssl.create_default_context(cafile=str(pem))


@contextlib.asynccontextmanager
async def mirror(folder: Path, context: ssl.SSLContext) -> AsyncIterator[str]:
    """A web server of the folder, at this URL; /moved/ leads there, /away/ to a server without TLS."""

    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"/{request.match_info['name']}")

    async def away(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"http://127.0.0.1:1/{request.match_info['name']}")

    async def whole(request: web.Request) -> web.Response:
        return web.Response(body=await asyncio.to_thread((folder / request.match_info["name"]).read_bytes))

    app = web.Application()
    app.router.add_get("/moved/{name}", moved)
    app.router.add_get("/away/{name}", away)
    app.router.add_get("/whole/{name}", whole)
    app.router.add_static("/", folder)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_pieces_come_from_a_mirror_and_count_as_traffic(tmp_path: Path) -> None:
    server, client = trusted_certificate(tmp_path)

    async def main() -> None:
        async with mirror(tmp_path, server) as url:
            scene = Scene(tmp_path, [f"{url}/moved/"])
            scene.run_files = replace(scene.run_files, mirrors=MirrorClient(client))
            await scene.get()
            from_host = scene.served[HOST.peer_id]
            assert from_host <= NUM_PIECES
            by_p2p, counted = scene.own.traffic()[1], scene.limited.traffic()[1]
            assert counted - by_p2p >= (NUM_PIECES - from_host) * PIECE_BYTES - 1000
            assert counted > by_p2p

    asyncio.run(main())


def test_a_mirror_that_is_none_is_told_why_and_no_other_way_is_gone(tmp_path: Path) -> None:
    server, client = trusted_certificate(tmp_path)
    (tmp_path / "file").write_bytes(bytes(range(100)))

    async def main() -> None:
        async with mirror(tmp_path, server) as url, MirrorClient(client, timeout_s=5.0) as mirrors:
            assert await mirrors.read(f"{url}/file", 10, 20) == bytes(range(10, 20))
            for bad, why in (
                (f"{url}/away/file", "only https"),
                (f"{url}/whole/file", "status 200, no range"),
                (f"{url}/nothing", "status 404"),
                ("http://127.0.0.1:1/file", "only https"),
            ):
                with pytest.raises(TransientError, match=why):
                    await mirrors.read(bad, 10, 20)
            with pytest.raises(TransientError):
                await mirrors.read(f"{url}/file", 90, 110)
            async with MirrorClient(timeout_s=5.0) as strict:
                with pytest.raises(TransientError, match="certificate"):
                    await strict.read(f"{url}/file", 10, 20)

    asyncio.run(main())


def test_a_host_names_https_mirrors_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", str(tmp_path / "run.toml")]) is ExitCode.OK
    manifest = str(tmp_path / "run.toml")
    assert run(["host", manifest, "--mirror", "http://example.org/data"]) is ExitCode.BAD_INPUT
    assert "--mirror http://example.org/data: give the https:// URL" in capsys.readouterr().err


def test_a_piece_is_put_by_several_at_once(tmp_path: Path) -> None:
    data = bytes(PIECE_BYTES)
    folder = PieceFolder(tmp_path / "some", PieceList(len(data), hashlib.sha256(data).digest()), 1)
    with ThreadPoolExecutor(4) as pool:
        for put in [pool.submit(folder.put, 0, data) for _ in range(16)]:
            put.result()
    assert folder.held() == [0]
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["0"]
    assert folder.piece(0) == data


def test_a_piece_that_is_wanted_twice_is_asked_for_once(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        honest = scene.donate(scene.network.transport(HONEST))
        await scene.get(honest, pieces=[0, 0, 3, 0, 3])
        assert scene.served.total() == 3  # one of them held-out

    asyncio.run(main())


def test_a_donor_that_says_nothing_holds_nobody_up_and_the_directory_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fetch looked its donors up anew, and waited 10 s for one that had stopped."""
    monkeypatch.setattr(peer.state.run_files, "SAID_SOON_S", 0.05)

    async def main() -> None:
        scene = Scene(tmp_path)
        honest, silent = (scene.donate(scene.network.transport(one)) for one in (HONEST, LIAR))
        scene.donors = (silent, honest)
        train, _ = await scene.run_files.open()
        scene.network.break_line(silent)
        async with asyncio.timeout(5.0):
            for index in range(NUM_PIECES):
                await scene.run_files.fetch(train, [index])
        assert scene.served[silent] == 0
        assert scene.num_lookups == 1

    asyncio.run(main())


def together(scene: Scene) -> tuple[RunFiles, RunFiles]:
    """Files of two peers of one daemon."""
    other = LimitedTransport(scene.network.transport(OTHER), Line())
    beside = replace(
        scene.run_files,
        host=Host(other, HOST.peer_id),
        transport=other,
        limited=other,
        turn=asyncio.Lock(),
        known=[],
        given={},
    )
    return scene.run_files, beside


def test_what_two_peers_of_a_daemon_need_comes_once(tmp_path: Path) -> None:
    async def fetch() -> None:
        scene = Scene(tmp_path)
        files = together(scene)
        ((train, _), (same, _)) = await asyncio.gather(*(each.open() for each in files))
        assert same.folder is train.folder
        await asyncio.gather(*(each.fetch(train, range(NUM_PIECES)) for each in files))
        assert sum(scene.served.values()) == NUM_PIECES
        received = scene.limited.traffic()[1] + files[1].limited.traffic()[1]
        assert received == pytest.approx(len(scene.bytes[0]), rel=0.01)

    asyncio.run(fetch())


def test_where_the_peer_that_fetches_goes_away_the_other_goes_on(tmp_path: Path) -> None:
    async def fetch() -> None:
        scene = Scene(tmp_path)
        one, other = together(scene)
        train, _ = await one.open()
        fetching = [asyncio.ensure_future(each.fetch(train, range(NUM_PIECES))) for each in (one, other)]
        while not train.folder.held():  # noqa: ASYNC110 - caught in the act
            await asyncio.sleep(0.001)
        fetching[0].cancel()
        await fetching[1]
        assert train.folder.held() == [*range(NUM_PIECES)]
        assert sum(scene.served.values()) <= NUM_PIECES + 1

    asyncio.run(fetch())


def test_a_piece_stays_while_any_peer_of_the_daemon_needs_it(tmp_path: Path) -> None:
    async def fetch() -> None:
        scene = Scene(tmp_path)
        folder = (await scene.get()).folder
        folder.forget("one", [0], most=1)
        assert folder.held() == [0, 5]
        await scene.get(pieces=[1, 2, 3])
        folder.forget("other", [1], most=1)
        assert folder.held() == [0, 1, 2, 3]  # two that nobody needs: one for each
        folder.let_go("one")
        folder.forget("other", [1], most=1)
        assert folder.held() == [1, 3]

    asyncio.run(fetch())


def test_files_that_nobody_reads_any_more_are_opened_anew_as_the_disk_has_them(tmp_path: Path) -> None:
    async def fetch() -> None:
        scene = Scene(tmp_path)
        one, other = together(scene)
        train = await scene.get()
        same, _ = await other.open()
        one.downloads.leave(ME.peer_id)
        assert (await one.open())[0].folder is same.folder is train.folder
        for reader in (ME, OTHER):
            one.downloads.leave(reader.peer_id)
        (tmp_path / "peer" / train.folder.name / "2").unlink()
        again, _ = await other.open()
        assert again.folder.held() == [0, 1, 3, 4, 5]

    asyncio.run(fetch())
