"""A demo under way: a host and its peers as processes of their own, watched from first step to last."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from bootstrap.demo.observed import Observed, Peer, short
from bootstrap.demo.processes import Program, end_all
from bootstrap.demo.report import held_out_bigram_loss
from bootstrap.demo.request import PreparedDemo
from bootstrap.demo.view import View
from swarm.attacks import DEVELOPER_VARIABLE
from swarm.network.identity_file import load_or_create_identity

log = logging.getLogger(__name__)

EVALUATE_TOKENS = 65536
REFRESH_S = 0.25
STALL_S = 240.0
"""Longer than any deadline of the run: silence for so long means that it hangs."""
FAREWELL_S = 20.0
"""How long the programs may take to end once the run is over."""
DRAIN_S = 40.0
GIVE_UP_S = 3.0
"""After a failure there may be nobody left to finish with."""


class Ending(Enum):
    """How a run ended."""

    DONE = "done"
    STOPPED = "stopped"
    """By the user."""
    FAILED = "failed"


@dataclass
class Demo:
    """One run of the demo. `run` starts its programs and ends them all before it returns."""

    prepared: PreparedDemo
    observed: Observed
    host: Program | None = None
    peers: dict[str, Program] = field(default_factory=dict)
    """By peer id."""
    kills: dict[str, int] = field(default_factory=dict)
    """The version at which each victim was killed."""
    bigram: float | None = None
    failure: str = ""
    culprit: Program | None = None
    """Whose log tells more of the failure."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, view: View, stop: asyncio.Event) -> Ending:
        """Start host and peers, watch until the run is over, fails or is stopped, and end them."""
        tasks = [asyncio.ensure_future(self._learn_bigram())]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await self._start_host()
            # Compiled here once, not by every peer at the same time.
            tasks.append(asyncio.ensure_future(asyncio.to_thread(_compile_kernels, self.prepared)))
            tasks.append(asyncio.ensure_future(self._start_peers_when_told(tasks[-1])))
            ending = await self._watch(view, stopping, tasks)
            await self._end_programs(ending, view)
            if ending is Ending.DONE:
                await tasks[0]
            return self._judged(ending)
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await end_all(self._programs(), patience_s=0.0)

    # -- starting -----------------------------------------------------------------------------------------

    async def _start_host(self) -> None:
        folder = self.prepared.folder
        arguments = [
            "host",
            str(folder.manifest),
            "--dir",
            str(folder.run),
            "--listen",
            "127.0.0.1:0",
            "--json",
            "--ends-with-run",
        ]
        arguments += ["--report", str(folder.host_report), "--evaluate-tokens", str(EVALUATE_TOKENS), "--verbose"]
        self.host = await Program.start("host", arguments, log=folder.logs / "host.log", on_line=self._on_line)

    async def _start_peers_when_told(self, rehearsal: asyncio.Task[None]) -> None:
        while not self.observed.addresses or not rehearsal.done():
            if self.observed.addresses:
                self.observed.phase = "compiling, once on this machine"
            await self._change()
        self.observed.phase = "starting the peers"
        request, folder = self.prepared.request, self.prepared.folder
        attackers = request.attackers()
        for number in range(request.peers):
            stage, attack = request.stage_of(number), attackers.get(number)
            # Made here, so that processes and the ids in the host's events can be matched.
            peer_id = load_or_create_identity(folder.peer(number) / "identity.key").peer_id
            self.observed.expect(peer_id, stage, number, attack)
            arguments = [
                "join",
                *self.observed.addresses,
                "--yes",
                "--dir",
                str(folder.peer(number)),
                "--stage",
                str(stage),
            ]
            arguments += ["--threads", str(request.threads), "--listen", "127.0.0.1:0", "--verbose"]
            self.peers[peer_id] = await Program.start(
                f"peer {number}",
                arguments if attack is None else [str(attack), *arguments],
                log=folder.logs / f"peer-{number}.log",
                module="swarm" if attack is None else "peer.adversary",
                more_environment={DEVELOPER_VARIABLE: "1"} if attack is not None else {},
            )

    async def _learn_bigram(self) -> None:
        data = self.prepared.data
        self.bigram = await asyncio.to_thread(held_out_bigram_loss, data, evaluate_tokens=EVALUATE_TOKENS)
        self.observed.bigram_loss = self.bigram

    # -- watching -----------------------------------------------------------------------------------------

    def _on_line(self, line: str) -> None:
        """A line of the host's standard output."""
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            log.info("host: %s", line)
            return
        now = time.monotonic()
        with self.prepared.folder.events.open("a") as file:
            file.write(json.dumps({"at_s": round(now - self.observed.started_at, 3), **event}) + "\n")
        self.observed.take(event, now=now)
        if event.get("event") == "listening":
            self.prepared.folder.address.write_text(" ".join(self.observed.addresses) + "\n")
        if event.get("event") == "version":
            self._kill_if_due()
        self._changed.set()

    async def _watch(
        self, view: View, stopping: asyncio.Task[Literal[True]], tasks: Sequence[asyncio.Task[None]]
    ) -> Ending:
        observed = self.observed
        observed.last_heard_at = time.monotonic()
        while True:
            now = time.monotonic()
            self._notice_deaths(now)
            view.show(observed, now=now)
            if stopping.done():
                return Ending.STOPPED
            if observed.finished:
                return Ending.DONE
            if self.failure or self._has_failed(now):
                return Ending.FAILED
            for task in tasks:
                if task.done():
                    task.result()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(stopping), REFRESH_S)

    def _kill_if_due(self) -> None:
        kill = self.prepared.request.kill
        if not kill.peers or self.kills or self.observed.version < kill.step:
            return
        now = time.monotonic()
        by_number = {peer.number: peer for peer in self.observed.peers.values()}
        victims = self.prepared.request.victims()
        others = [peer for peer in self.observed.peers.values() if peer.number not in victims]
        trained = {peer.stage for peer in others if peer.is_live and peer.microbatches}
        if not {by_number[number].stage for number in victims} <= trained:
            return  # whoever killed a stage's only member would have ended it
        for number in victims:
            peer = by_number[number]
            program = self.peers[peer.peer_id]
            program.kill()
            peer.state = "killed"
            self.kills[peer.peer_id] = self.observed.version
            self.observed.kills.append(self.observed.version)
            self.observed.tell(
                f"kill -9 {program.pid}: {short(peer.peer_id)} of stage {peer.stage}, at step {self.observed.version}",
                now=now,
                is_bad=True,
            )

    def _notice_deaths(self, now: float) -> None:
        for peer_id, program in self.peers.items():
            peer = self.observed.peers[peer_id]
            if program.exit is None or not peer.is_live or self.observed.version >= self.observed.num_steps:
                continue
            peer.state = "killed" if program.exit < 0 else "failed"
            self.observed.tell(f"{short(peer_id)} of stage {peer.stage} {died(program)}", now=now, is_bad=True)

    def _has_failed(self, now: float) -> bool:
        """Whether the run cannot go on; says why."""
        observed, request = self.observed, self.prepared.request
        assert self.host is not None
        if self.host.exit is not None:
            self.culprit = self.host
            self.failure = f"the host {died(self.host)}"
        elif now - observed.last_heard_at > STALL_S:
            self.culprit = self.host
            self.failure = f"nothing has happened for {STALL_S:.0f} s at step {observed.version}"
        elif len(self.peers) == request.peers and observed.version < observed.num_steps:
            empty = [stage for stage in range(request.stages) if not self._has_live_peer(stage)]
            early = [program for program in self.peers.values() if program.exit is not None]
            if empty:
                dead = [self.peers[id] for id, peer in self.observed.peers.items() if peer.stage == empty[0]]
                self.culprit = dead[-1]
                ends = ", ".join(f"{program.name} {died(program)}" for program in dead)
                self.failure = f"stage {empty[0]} has no peer left: {ends}"
            elif early and observed.began_at is None:
                self.culprit = early[0]
                self.failure = f"{early[0].name} {died(early[0])} before the run began"
        return bool(self.failure)

    def _has_live_peer(self, stage: int) -> bool:
        def is_there(peer: Peer) -> bool:
            own = self.peers.get(peer.peer_id)
            return peer.is_live or (own is not None and own.exit is None and peer.state != "banned")

        return any(is_there(peer) for peer in self.observed.peers.values() if peer.stage == stage)

    async def _change(self) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), 1.0)

    # -- ending -------------------------------------------------------------------------------------------

    def _programs(self) -> list[Program]:
        return [*self.peers.values(), *([self.host] if self.host is not None else [])]

    async def _end_programs(self, ending: Ending, view: View) -> None:
        """End all programs, the view going on: by themselves if the run is done, else by signals."""
        words = {
            Ending.DONE: "saying goodbye",
            Ending.STOPPED: "stopping: peers finish what they have in flight",
            Ending.FAILED: "failed: stopping the others",
        }
        self.observed.closing = words[ending]
        ended = asyncio.ensure_future(self._end_host_then_peers(ending))
        try:
            while not ended.done():
                view.show(self.observed, now=time.monotonic())
                await asyncio.wait([ended], timeout=REFRESH_S)
            ended.result()
        finally:
            ended.cancel()
        for peer_id, program in self.peers.items():
            peer = self.observed.peers[peer_id]
            if peer.is_live:
                peer.state = ("done" if ending is Ending.DONE else "left") if program.exit == 0 else "failed"
        view.show(self.observed, now=time.monotonic())

    async def _end_host_then_peers(self, ending: Ending) -> None:
        assert self.host is not None
        banned = [program for peer_id, program in self.peers.items() if self.observed.peers[peer_id].state == "banned"]
        await end_all(banned, patience_s=GIVE_UP_S)  # nobody tells them anything any more
        if ending is Ending.DONE:  # the host has told everyone
            waits = [asyncio.ensure_future(program.wait()) for program in self._programs()]
            _, late = await asyncio.wait(waits, timeout=FAREWELL_S)
            for wait in late:
                wait.cancel()
            for program in [program for program in self._programs() if program.exit is None]:
                self.observed.tell(f"{program.name} did not end by itself", now=time.monotonic(), is_bad=True)
        patience_s = GIVE_UP_S if ending is Ending.FAILED else DRAIN_S
        await self.host.end(patience_s=patience_s)
        await end_all([*self.peers.values()], patience_s=patience_s)

    def _judged(self, ending: Ending) -> Ending:
        """A run that finished has failed all the same if a program of ours broke, but for liars and the banned."""
        if ending is not Ending.DONE:
            return ending
        outcasts = [self.peers[id] for id, peer in self.observed.peers.items() if id in self.peers and peer.is_outcast]
        for program in self._programs():
            if program in outcasts:
                continue
            if program.exit != 0 and not program.killed and not _killed_by_someone(program):
                self.culprit = program
                self.failure = f"the run finished, but {program.name} {died(program)}"
                return Ending.FAILED
        return ending


def died(program: Program) -> str:
    """How a program ended, in words."""
    if program.exit is None:
        return "is running"
    return f"was killed by signal {-program.exit}" if program.exit < 0 else f"ended with exit code {program.exit}"


def _compile_kernels(prepared: PreparedDemo) -> None:
    # These bring torch and transformers, which the start of the host need not wait for.
    from swarm.local.rehearsal import rehearse
    from swarm.manifest.file import freeze, read_manifest

    rehearse(freeze(read_manifest(prepared.folder.manifest), prepared.data, ()))


def _killed_by_someone(program: Program) -> bool:
    """Killed from outside, as a user may to see the others go on."""
    return program.exit is not None and program.exit < 0


def failure_text(demo: Demo) -> str:
    """Why a demo failed, with the last lines of the log that tells more."""
    lines = [demo.failure]
    if demo.culprit is not None:
        lines += [f"the last lines of {demo.culprit.log}:", *(f"    {line}" for line in demo.culprit.last_lines())]
    lines.append(f"all logs are in {demo.prepared.folder.logs}")
    return "\n".join(lines)
