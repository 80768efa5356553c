"""The host's page: what it shows is right, nothing of it comes from elsewhere, everybody can read it."""

import asyncio
import base64
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import axe_core_python
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bootstrap.owner.progress import PeerFigures
from bootstrap.owner.trouble import Notice
from bootstrap.program.dashboard import MAX_NOTICE_PEERS, MAX_NOTICES, MAX_POINTS, Dashboard, thinned
from swarm.commands.evidence import fetched
from swarm.core.audit.honest_audits import Agreed, AuditsMade, HonestAudits
from swarm.core.canonical import unpack
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.host_protocol import StepReport
from swarm.identity.key import verify
from swarm.network.services import web_site
from tests import ROOT
from tests.bootstrap.state.hosted import Hosted, hosted
from tests.swarm.network.services.test_coordinator_service import genesis_value
from tests.swarm_in_process import identity_of
from verification.audit.verdicts import Ban
from verification.replay import evidence_file

PAGE = ROOT / "bootstrap" / "page"
PEERS = [identity_of(number).peer_id for number in range(3)]


def report_of(step: int, loss: float) -> StepReport:
    return StepReport(
        stage=0,
        version=step + 1,
        loss_sum=loss * 64,
        num_targets=64,
        stale=0,
        counted=4,
        round_s=0.5,
        round_bytes=100,
        overlap=0.1,
        gradient_norm=1.0,
        microbatches=4,
        evaluated=0,
        reassigned=0,
        stragglers=0,
        refused=0,
        sent_bytes=10,
        received_bytes=10,
        busy_s=0.001,
        exact_s=0.001,
        num_direct=2,
        num_punched=1,
        num_relayed=0,
        screens=(("gradient_norm", 2),),
        state_digest=b"",
        not_finite=(),
        answered_s=0.5,
        waited_s=0.25,
        audits=AuditsMade(
            run_id="run",
            auditor=PEERS[0],
            stage=StageIndex(0),
            version=step + 1,
            numeric_class="torch-2.13.0/cpu-avx2/fp32",
            honest=(HonestAudits(numeric_class="torch-2.11.0/cuda-sm90/fp32", gradient=Agreed(step + 1, 0.25)),),
        ).signed_by(identity_of(0)),
    )


def train(host: Hosted, steps: range) -> None:
    """What the host hears of a run of one stage after another."""
    itself = host.itself
    for stage in range(2):
        if stage not in itself.books.lineages:
            host.ledger.append("genesis", genesis_value(host, stage))
    for step in steps:
        for stage in range(2):
            facts: Any = {"stage": stage, "step": step, "name": bytes(32), "ids": [step], "joins": [], "leaves": []}
            facts["credit"] = [[PEERS[stage], 1, 64]]
            host.ledger.append("result", facts)
            itself.progress.take_result(facts, 1000.0 + step)
        itself.progress.peers.setdefault(PEERS[0], PeerFigures(0, 0.0, 0.0))
        itself.progress.take(PEERS[0], report_of(step, 3.0 - step / 10), is_member=True)


def ban(host: Hosted) -> bytes:
    """Ban the third peer, with an evidence file; its bytes."""
    digest, body = b"\xab" * 32, b"what it did"
    made = Ban(host.run.run_id, PEERS[2], StageIndex(1), Version(4), "replay_mismatch", digest)
    host.ledger.append("ban", made.signed_by(host.run.run_key).to_value())
    folder = host.run.folder.root / "evidence"
    folder.mkdir()
    (folder / f"replay_mismatch-{PEERS[2][-8:]}-{digest.hex()[:16]}.evidence").write_bytes(body)
    return body


def notice(host: Hosted, step: int) -> None:
    """The host notices a spike of the loss."""
    peers = tuple(identity_of(number).peer_id for number in range(MAX_NOTICE_PEERS + 2))
    host.itself._notice(Notice("loss_spike", step, None, peers, (1, 2, 5), "the loss <b>9</b> is high"))


@asynccontextmanager
async def watched(tmp_path: Path) -> AsyncIterator[tuple[Hosted, aiohttp.ClientSession]]:
    async with hosted(tmp_path) as host:
        assert host.doors.web is not None
        async with aiohttp.ClientSession(host.doors.web, timeout=aiohttp.ClientTimeout(total=20)) as session:
            yield host, session


def test_state_tells_the_run_and_no_address(tmp_path: Path) -> None:
    async def look() -> None:
        async with watched(tmp_path) as (host, session):
            train(host, range(3))
            body = ban(host)
            host.archive(5)
            async with session.get("/state.json") as answer:
                text = await answer.text()
            state = json.loads(text)
            assert (state["version"], state["total_steps"], state["tokens"]) == (3, 10, 192)
            assert state["loss"] == [[0, 3.0], [1, 2.9], [2, 2.8]]
            assert state["speed"] == [[1, 64.0], [2, 64.0]]
            assert [(one["rank"], one["peer"], one["tokens"]) for one in state["leaders"]] == [
                (number + 1, peer, 192) for number, peer in enumerate(sorted(PEERS[:2]))
            ]
            nothing = dict.fromkeys(("reporters", "audits"), 0) | dict.fromkeys(
                ("median_share", "share_of_two", "largest_share"), 0.0
            )
            assert state["audits"] == [
                {
                    "auditor": "torch-2.13.0/cpu-avx2/fp32",
                    "audited": "torch-2.11.0/cuda-sm90/fp32",
                    "reporters": 1,
                    "activation": nothing,
                    "gradient": {
                        "reporters": 1,
                        "audits": 3,
                        "median_share": 0.25,
                        "share_of_two": 0.0,
                        "largest_share": 0.25,
                    },
                    "contribution": nothing,
                }
            ]
            assert state["bounds"] == {"activation": 1.0, "gradient": 1.0, "contribution": 1.0}
            async with session.get("/audits.json") as answer:
                (said,) = await answer.json()
            word = AuditsMade.from_value(unpack(base64.b64decode(said), max_bytes=1 << 16))
            word.check(run_id="run", auditor=PEERS[0], stage=0, version=3, verify=verify)
            assert word.honest[0].gradient == Agreed(3, 0.25)
            assert [(one["peer"], one["kind"], one["step"]) for one in state["shut_out"]] == [
                (PEERS[2], "replay_mismatch", 4)
            ]
            assert not re.search(r"\d+\.\d+\.\d+\.\d+|/ip4/|/ip6/|/p2p/", text), "somebody's address is shown"
            async with session.get(f"/evidence/{state['shut_out'][0]['evidence']}") as answer:
                assert await answer.read() == body
                assert "attachment" in answer.headers["Content-Disposition"]
            (checkpoint,) = state["checkpoints"]
            for file in checkpoint["files"]:
                async with session.get(f"/checkpoints/5/{file['name']}") as answer:
                    assert len(await answer.read()) == file["bytes"]

    asyncio.run(look())


def proof(host: Hosted, size: int) -> tuple[bytes, Path]:
    """Ban the third peer for what is in a file of so many bytes; the digest it ends with, and where it is."""
    body = b"\x17" * (size - 32)
    digest = hashlib.sha256(body).digest()
    made = Ban(host.run.run_id, PEERS[2], StageIndex(1), Version(4), "replay_mismatch", digest)
    host.ledger.append("ban", made.signed_by(host.run.run_key).to_value())
    path = host.run.folder.root / "evidence" / f"replay_mismatch-{PEERS[2][-8:]}-{digest.hex()[:16]}.evidence"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(body + digest)
    return digest, path


def test_evidence_is_fetched_by_what_the_run_key_signed_and_nothing_else_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch() -> None:
        async with watched(tmp_path) as (host, _):
            assert host.doors.web is not None
            digest, path = proof(host, 3 << 20)
            page, key, out = host.doors.web, host.run.run_key.peer_id, tmp_path / "fetched.evidence"
            assert await fetched(page, PEERS[2], out, run_key=key) == 3 << 20
            assert out.read_bytes()[-32:] == digest
            out.unlink()
            for peer, run_key, kind in ((PEERS[2], PEERS[0], "verdict"), (PEERS[1], key, "404")):
                with pytest.raises((RemoteError, TransientError), match=kind if kind == "404" else "under key"):
                    await fetched(page, peer, out, run_key=run_key)
            with monkeypatch.context() as patch:
                patch.setattr(evidence_file, "largest_evidence_bytes", lambda settings: (3 << 20) - 1)
                with pytest.raises(RemoteError, match="at most"):
                    await fetched(page, PEERS[2], out, run_key=key)
            body = bytearray(path.read_bytes())
            body[1 << 20] ^= 1
            path.write_bytes(body)
            with pytest.raises(RemoteError, match="SHA-256"):
                await fetched(page, PEERS[2], out, run_key=key)
            assert not [name for name in os.listdir(tmp_path) if "evidence" in name]

    asyncio.run(fetch())


def test_few_files_are_taken_at_a_time_and_who_takes_nothing_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_site, "WRITE_S", 2.0)

    async def look() -> None:
        async with watched(tmp_path) as (host, session):
            digest, _ = proof(host, 48 << 20)
            path = f"/evidence/{digest.hex()}"
            slow = [await session.get(path) for _ in range(web_site.MAX_DOWNLOADS_EACH)]
            assert {answer.status for answer in slow} == {200}
            async with session.get(path) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "60")
            async with session.get("/state.json") as answer:
                assert answer.status == 200, "the page is served besides"
            async with asyncio.timeout(60):
                while True:
                    async with session.get(path) as answer:
                        if answer.status == 200:
                            assert len(await answer.read()) == 48 << 20
                            break
                    await asyncio.sleep(0.05)
            read = await asyncio.gather(*(answer.read() for answer in slow), return_exceptions=True)
            assert any(isinstance(one, aiohttp.ClientError) for one in read), "its place went to who takes something"

    asyncio.run(look())


ELSEWHERE = (
    "/evidence/..%2f..%2frun.key",
    "/evidence/0123456789abcdef",
    f"/evidence/{bytes(32).hex()}",
    f"/verdict/{PEERS[0]}",
    "/checkpoints/5/..%2f..%2frun.key",
    "/checkpoints/5/checkpoint.json%00",
    "/checkpoints/6/checkpoint.json",
    "/checkpoints/x/y",
    "/ledger.sqlite",
    "/run.key",
)


def test_nothing_else_is_served_and_nobody_is_served_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_site, "BURST", len(ELSEWHERE) + 1 + web_site.MAX_WATCHERS_EACH + 1)
    monkeypatch.setattr(web_site, "CALLS_PER_S", 0.001)

    async def look() -> None:
        async with watched(tmp_path) as (host, session):
            host.archive(5)
            for path in ELSEWHERE:
                async with session.get(path) as answer:
                    assert answer.status == 404, path
                    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            async with session.post("/") as answer:
                assert answer.status == 405
            streams = [await session.get("/events") for _ in range(web_site.MAX_WATCHERS_EACH)]
            assert {stream.status for stream in streams} == {200}
            async with session.get("/events") as answer:
                assert answer.status == 503
            async with session.get("/state.json") as answer:
                assert answer.status == 429
                assert int(answer.headers["Retry-After"]) > 0
            for stream in streams:
                stream.close()

    asyncio.run(look())


def test_open_page_hears_of_a_ban_and_of_a_falling_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_site, "TICK_S", 0.02)

    async def watch() -> None:
        async with watched(tmp_path) as (host, session), session.get("/events") as events:
            assert events.headers["Content-Type"] == "text/event-stream"

            async def next_state() -> dict[str, Any]:
                while not (line := await events.content.readline()).startswith(b"data: "):
                    assert line, "the stream ended"
                state: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                return state

            assert (await next_state())["loss"] == []
            train(host, range(2))
            while len((state := await next_state())["loss"]) < 2:
                pass
            assert state["loss"][0][1] > state["loss"][1][1]
            ban(host)
            while not (state := await next_state())["shut_out"]:
                pass
            assert PEERS[2] in json.dumps(state["shut_out"])

    asyncio.run(watch())


def test_newest_notices_are_told_and_all_are_counted(tmp_path: Path) -> None:
    async def look() -> tuple[list[Any], str]:
        async with watched(tmp_path) as (host, session):
            for step in range(MAX_NOTICES + 5):
                notice(host, step)
            async with session.get("/state.json") as answer:
                notices: list[Any] = (await answer.json())["notices"]
            async with session.get("/metrics") as answer:
                return notices, await answer.text()

    notices, metrics = asyncio.run(look())
    assert [one["step"] for one in notices] == list(range(MAX_NOTICES + 4, 4, -1))
    assert {(one["num_peers"], len(one["peers"])) for one in notices} == {(MAX_NOTICE_PEERS + 2, MAX_NOTICE_PEERS)}
    assert f'homeswarm_notices_total{{kind="loss_spike",run="tiny"}} {MAX_NOTICES + 5}.0' in metrics


def test_metrics_parse_and_count(tmp_path: Path) -> None:
    async def look() -> str:
        async with watched(tmp_path) as (host, session):
            train(host, range(3))
            ban(host)
            async with session.get("/metrics") as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                return await answer.text()

    families = {family.name: family for family in text_string_to_metric_families(asyncio.run(look()))}
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families.values())
    assert all(name.startswith("homeswarm_") for name in families)
    values = {
        name: [sample.value for sample in family.samples if not sample.name.endswith("_created")]
        for name, family in families.items()
    }
    assert values["homeswarm_version"] == [3]
    assert values["homeswarm_tokens"] == [192]
    assert values["homeswarm_stage_version"] == [3, 3]
    assert values["homeswarm_shut_out"] == [1]
    assert values["homeswarm_screens"] == [2]
    assert values["homeswarm_training_loss"] == [pytest.approx(2.8)]


def test_points_are_thinned_evenly_with_both_ends() -> None:
    points = list(range(10_000))
    few = thinned(points)
    assert (len(few), few[0], few[-1]) == (MAX_POINTS, 0, 9999)
    assert max(after - before for before, after in itertools.pairwise(few)) <= 26
    assert thinned(points[:MAX_POINTS]) == points[:MAX_POINTS]


class Markup(HTMLParser):
    """Every element with its attributes, and the text of those that have some."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open[: len(self._open) - 1 - self._open[::-1].index(tag)]

    def handle_data(self, data: str) -> None:
        if data.strip() and self._open:
            self.texts[self._open[-1]] = data.strip()

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_page_has_landmarks_labels_and_nothing_from_elsewhere() -> None:
    text = (PAGE / "index.html").read_text()
    markup = Markup(text)
    assert markup.named("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in markup.named("meta"))
    for landmark in ("header", "main", "footer", "h1"):
        assert len(markup.named(landmark)) == 1, landmark
    ids = {attributes["id"] for _, attributes in markup.elements if "id" in attributes}
    assert len(ids) == sum("id" in attributes for _, attributes in markup.elements), "an id is used twice"
    for section in markup.named("section"):
        assert section["aria-labelledby"] in ids
    for _, attributes in markup.elements:
        for name in ("href", "src"):
            assert (attributes.get(name) or "/").startswith(("/", "#")), attributes
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes), attributes
        if attributes.get("role") in ("img", "group"):
            assert attributes["aria-labelledby"] in ids
        if attributes.get("role") == "group":
            assert attributes["tabindex"] == "0", "what scrolls is reached by the keyboard"
    assert all(header["scope"] == "col" for header in markup.named("th"))
    for name in ("page.js", "page.css", "favicon.svg"):
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", (PAGE / name).read_text()), name
    script = (PAGE / "page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    assert set(re.findall(r'find\("([a-z]+)"\)', script)) <= ids


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_have_contrast_in_light_and_in_dark() -> None:
    blocks = re.findall(r":root \{([^}]*)\}", (PAGE / "page.css").read_text())
    assert len(blocks) == 2
    for block in blocks:
        colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", block))
        for ground in ("ground", "panel"):
            for name in ("text", "soft", "bad", "focus"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
            for name in ("one", "two"):  # lines of the charts
                assert contrast(colours[name], colours[ground]) >= 3.0, (name, ground)


class Browser:
    """A page that is open in a browser, over the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count()

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(20):
            while (answer := await self._socket.receive_json()).get("id") != number:
                pass
        assert "error" not in answer, answer
        assert "exceptionDetails" not in answer["result"], answer
        return answer["result"]

    async def evaluate(self, expression: str) -> Any:
        """What JavaScript gives in the page, once it is settled."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return found["result"].get("value")


@asynccontextmanager
async def browser_at(url: str, folder: Path) -> AsyncIterator["Browser"]:
    """A headless Chromium that has opened the page."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed here")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--window-size=400,800"]
    process = await asyncio.create_subprocess_exec(
        program, *flags, "--remote-debugging-port=0", url, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while not (found := re.search(rb"ws://([0-9.:]+)/", await process.stderr.readline())):
                pass
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1].decode()}/json/list") as listed:
                (page,) = [target for target in await listed.json() if target["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"]) as socket:
                yield Browser(socket)
    finally:
        process.kill()
        await process.wait()


async def accessibility_faults(browser: Browser) -> list[str]:
    """What axe finds against WCAG 2.1 AA and good practice, in the light and in the dark page."""
    await browser.evaluate((Path(axe_core_python.__file__).parent / "axe.min.js").read_text() + "; 0")
    faults = []
    for scheme in ("light", "dark"):
        await browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        found = json.loads(await browser.evaluate("axe.run().then(found => JSON.stringify(found))"))
        assert len(found["passes"]) > 10, "axe found nothing to look at"
        for fault in found["violations"]:
            at = "; ".join(str(node["target"]) for node in fault["nodes"])
            faults.append(f"{scheme}: {fault['id']}: {fault['help']}: {at}")
    return faults


@pytest.mark.soak
def test_real_browser_sees_the_loss_fall_and_a_ban_appear(tmp_path: Path) -> None:
    async def look() -> None:
        async with hosted(tmp_path) as host:
            assert host.doors.web is not None
            async with browser_at(host.doors.web, tmp_path / "browser") as browser:
                evaluate = browser.evaluate

                async def until(expression: str, wanted: str) -> None:
                    async with asyncio.timeout(30):
                        while wanted not in str(await evaluate(expression)):
                            pass

                loss = "document.getElementById('loss-t').textContent"
                await until("document.getElementById('live')?.textContent", "live")
                train(host, range(2))
                await until(loss, "training loss 3.00 at step 0, 2.90 at step 1")
                train(host, range(2, 3))
                await until(loss, "2.80 at step 2")
                assert await evaluate("document.querySelectorAll('#loss path.one').length") == 1
                await until("document.getElementById('bans').innerText", "nobody")
                ban(host)
                await until("document.getElementById('bans').innerText", "ban: replay mismatch")
                notices = "document.getElementById('notices').innerText"
                await until(notices, "nothing so far")
                notice(host, 2)
                await until(notices, "loss spike at step 2: the loss <b>9</b> is high; in 3 microbatches; peers …")
                await until(notices, "and 2 more")
                # On a phone nothing but tables scrolls sideways, and what the keyboard reaches has a name.
                assert await evaluate("document.documentElement.scrollWidth <= window.innerWidth")
                nameless = "[...document.querySelectorAll('a, [tabindex=\"0\"], summary')].filter(one => "
                nameless += "!one.textContent.trim() && !one.getAttribute('aria-labelledby')).length"
                assert await evaluate(nameless) == 0
                assert await accessibility_faults(browser) == []

    asyncio.run(look())


def test_bans_that_whoever_likes_brings_about_cost_the_page_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them had the folder of evidence looked through, whenever the page was made: 1,000 took 0.7 s."""

    async def look() -> None:
        async with watched(tmp_path) as (host, _session):
            folder = host.run.folder.root / "evidence"
            folder.mkdir()
            for number in range(120):
                peer, digest = PeerId(f"12D3Koo{number}"), hashlib.sha256(bytes([number])).digest()
                made = Ban(host.run.run_id, peer, StageIndex(1), Version(4), "replay_mismatch", digest)
                host.itself.books.verdicts[peer] = {"ban": made.signed_by(host.run.run_key).to_value()}
                if number % 2:
                    (folder / f"replay_mismatch-{peer[-8:]}-{digest.hex()[:16]}.evidence").write_bytes(b"")
            looks = 0
            whole = Path.glob

            def glob(path: Path, pattern: str) -> Any:
                nonlocal looks
                looks += 1
                return whole(path, pattern)

            monkeypatch.setattr(Path, "glob", glob)
            shown = Dashboard(host.itself).state()["shut_out"]
            assert looks == 1
            assert [one["peer"] for one in shown] == [f"12D3Koo{number}" for number in range(70, 120)]
            assert [one["evidence"] is not None for one in shown] == 25 * [False, True]

    asyncio.run(look())
