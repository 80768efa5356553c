"""What the demo shows, from the host's events: progress, loss, speed, and what each peer does."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from swarm.attacks import Attack

RATE_WINDOW_S = 15.0
"""Speed and load are those of the last seconds."""
RECENT_STEPS = 10
MAX_NEWS = 200


@dataclass
class Peer:
    """A row of the view."""

    peer_id: str
    stage: int
    number: int | None
    """Which of the demo's own peers; None for one that joined by itself."""
    state: str = "starting"
    """starting, ready, training, killed, banned, left, failed, done"""
    attack: Attack | None = None
    """How the demo makes it misbehave."""
    microbatches: int = 0
    sent_bytes: int = 0
    reassigned: int = 0
    version: int = 0
    busy: deque[tuple[float, float]] = field(default_factory=deque)
    """(time, seconds its compute thread had worked by then)."""

    @property
    def is_live(self) -> bool:
        return self.state in ("starting", "ready", "training")

    @property
    def is_outcast(self) -> bool:
        """Whether it was made to misbehave, or was banned: however it ends, the run is none the worse."""
        return self.attack is not None or self.state == "banned"

    def busy_share(self) -> float:
        """Share of the last seconds in which it computed."""
        if len(self.busy) < 2:
            return 0.0
        (began_at, began), (ended_at, ended) = self.busy[0], self.busy[-1]
        return min(1.0, (ended - began) / max(ended_at - began_at, 1e-9))


@dataclass(frozen=True)
class News:
    """A line for the user: something happened to the swarm."""

    at_s: float
    """Since the run began; before that since the demo did."""
    text: str
    is_bad: bool = False
    is_routine: bool = False
    """Only the last of these is worth a line where lines are few."""


@dataclass(frozen=True)
class Out:
    """A peer is shut out."""

    how: str
    """banned or quarantined"""
    kind: str
    """What for."""
    step: int


@dataclass
class Observed:
    """A run as its host tells it. Times are those at which events came, on one clock."""

    num_steps: int
    tokens_per_step: int
    started_at: float
    bigram_loss: float | None = None
    local_steps: int = 1
    """More: inner steps of a step, which is then a window."""
    addresses: list[str] = field(default_factory=list)
    phase: str = "starting the host"
    closing: str = ""
    """What the demo does once it no longer watches."""
    version: int = 0
    began_at: float | None = None
    peers: dict[str, Peer] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    checkpoints: dict[int, str] = field(default_factory=dict)
    news: deque[News] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    kills: list[int] = field(default_factory=list)
    """Versions at which the demo killed peers."""
    bans: list[dict[str, Any]] = field(default_factory=list)
    """peer_id, stage, kind, step and evidence of each, in order."""
    outs: dict[str, Out] = field(default_factory=dict)
    """Who is shut out, by peer id."""
    last_heard_at: float = 0.0
    finished: bool = False
    _loss_sums: dict[int, tuple[float, int]] = field(default_factory=lambda: defaultdict(lambda: (0.0, 0)))
    _reached: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def word(self) -> str:
        """What one of the run's steps is called."""
        return "window" if self.local_steps > 1 else "step"

    def expect(self, peer_id: str, stage: int, number: int, attack: Attack | None = None) -> None:
        """One of the demo's own peers, which misbehaves if there is an `attack`."""
        self.peers[peer_id] = Peer(peer_id, stage, number, attack=attack)

    def take(self, event: dict[str, Any], *, now: float) -> None:
        """One event of the host."""
        self.last_heard_at = now
        match event:
            case {"event": "preparing", "what": what}:
                self.phase = what.removesuffix(" ...")
            case {"event": "listening", "addresses": addresses}:
                self.addresses = list(addresses)
            case {"event": "admitted", "peer_id": peer_id, "stage": stage}:
                self._peer(peer_id, stage).state = "ready"
            case {"event": "waiting", "missing": missing} if missing:
                wanted = ", ".join(f"{count} of stage {stage}" for stage, count in sorted(missing.items()))
                self.phase = f"waiting for peers: {wanted}"
            case {"event": "genesis"}:
                self.began_at, self.phase = now, "training"
                self._reached.append((now, 0))
                for peer in self.peers.values():
                    if peer.state == "ready":
                        peer.state = "training"
                self._tell_attacks(range(1), now)
            case {"event": "step"}:
                self._take_step(event, now)
            case {"event": "version", "version": version}:
                self._tell_attacks(range(self.version + 1, version + 1), now)
                self.version = max(self.version, version)
                self._reached.append((now, version))
                while self._reached[-1][0] - self._reached[0][0] > RATE_WINDOW_S and len(self._reached) > 2:
                    self._reached.popleft()
                if self.version >= self.num_steps:
                    self.phase = "measuring the held-out loss"
            case {"event": "evaluation", "version": version, "held_out_loss": loss}:
                self.held_out[version] = loss
                self.tell(f"held-out loss at step {version}: {loss:.3f}", now=now)
            case {"event": "checkpoint", "version": version, "path": path}:
                self.checkpoints[version] = path
                self.tell(f"checkpoint at step {version}", now=now, is_routine=True)
            case {"event": "joined", "peer_id": peer_id, "stage": stage}:
                self._peer(peer_id, stage).state = "training"
                self.tell(f"{short(peer_id)} joined stage {stage}", now=now)
            case {"event": "left", "peer_id": peer_id, "stage": stage, "reason": reason}:
                self._lost(self._peer(peer_id, stage), f"is off stage {stage}'s roster ({reason})", now)
            case {"event": "goodbye", "peer_id": peer_id, "stage": stage}:
                peer = self._peer(peer_id, stage)
                if peer.is_live:
                    peer.state = "done" if self.version >= self.num_steps else "left"
                    if peer.state == "left":
                        self.tell(f"{short(peer_id)} said goodbye to stage {stage}", now=now)
            case {"event": "banned", "peer_id": peer_id, "stage": stage, "kind": kind, "step": step}:
                ban = {"peer_id": peer_id, "stage": stage, "kind": kind, "step": step}
                self.bans.append({**ban, "evidence": event.get("evidence")})
                self._peer(peer_id, stage).state = "banned"
                self.outs[peer_id] = Out("banned", kind, step)
                self.tell(f"banned: {short(peer_id)} of stage {stage} for {kind} at step {step}", now=now, is_bad=True)
            case {"event": "quarantined", "peer_id": peer_id, "stage": stage, "kind": kind, "step": step}:
                text = f"quarantined: {short(peer_id)} of stage {stage} for {kind} at step {step}"
                self.tell(text, now=now, is_bad=True)
                self._peer(peer_id, stage)
                self.outs.setdefault(peer_id, Out("quarantined", kind, step))
            case {"event": "pardoned" | "promoted" as what, "peer_id": peer_id, "stage": stage}:
                self.outs.pop(peer_id, None)
                self.tell(f"{what}: {short(peer_id)} of stage {stage}", now=now)
            case {"event": "finished"}:
                self.finished = True

    def tell(self, text: str, *, now: float, is_bad: bool = False, is_routine: bool = False) -> None:
        """A line of news."""
        self.news.append(News(now - (self.began_at or self.started_at), text, is_bad, is_routine))

    def loss(self) -> list[tuple[int, float]]:
        """Training loss of each step that has one, by step."""
        return [(step, total / count) for step, (total, count) in sorted(self._loss_sums.items()) if count]

    def recent_loss(self) -> float | None:
        """Mean of the last RECENT_STEPS steps that have a loss, of a quarter of them while there are few."""
        values = [value for _, value in self.loss()]
        return fmean(values[-max(1, min(RECENT_STEPS, len(values) // 4)) :]) if values else None

    def steps_per_s(self) -> float:
        """Over the last seconds."""
        if len(self._reached) < 2:
            return 0.0
        (began_at, began), (ended_at, ended) = self._reached[0], self._reached[-1]
        return (ended - began) / max(ended_at - began_at, 1e-9)

    def tokens_per_s(self) -> float:
        return self.steps_per_s() * self.tokens_per_step

    def left_s(self) -> float | None:
        """Seconds until the last step, at the present rate; None before there is one."""
        rate = self.steps_per_s()
        return (self.num_steps - self.version) / rate if rate and self.version < self.num_steps else None

    def _peer(self, peer_id: str, stage: int) -> Peer:
        peer = self.peers.setdefault(peer_id, Peer(peer_id, stage, None))
        peer.stage = stage
        return peer

    def _take_step(self, event: dict[str, Any], now: float) -> None:
        peer = self._peer(event["peer_id"], event["stage"])
        if peer.state in ("starting", "ready"):
            peer.state = "training"
        peer.microbatches, peer.sent_bytes = event["microbatches"], event["sent_bytes"]
        peer.reassigned, peer.version = event["reassigned"], event["step"] + 1
        peer.busy.append((now, event["busy_s"]))
        while peer.busy[-1][0] - peer.busy[0][0] > RATE_WINDOW_S and len(peer.busy) > 2:
            peer.busy.popleft()
        total, count = self._loss_sums[event["step"]]
        self._loss_sums[event["step"]] = (total + event["loss_sum"], count + event["num_targets"])

    def _tell_attacks(self, steps: range, now: float) -> None:
        for peer in self.peers.values():
            if peer.attack is not None and peer.attack.from_step in steps:
                begins = f"{short(peer.peer_id)} of stage {peer.stage} misbehaves: {peer.attack}"
                self.tell(begins, now=now, is_bad=True)

    def _lost(self, peer: Peer, what: str, now: float) -> None:
        if peer.is_live:
            peer.state = "left"
        self.tell(f"{short(peer.peer_id)} {what}", now=now)


def short(peer_id: str) -> str:
    """The end of a peer's id, enough for people to tell peers apart."""
    return peer_id[-8:]
