"""The host's figures as its web page and Prometheus show them. Nothing here says where anybody is."""

import base64
import importlib.resources
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from bootstrap.owner.honest_spread import spread_by_pair
from bootstrap.owner.progress import StepFigures
from bootstrap.owner.trouble import KINDS
from bootstrap.program.host import Host
from swarm.checkpoint.archive import checkpoint_path
from swarm.checkpoint.record import CheckpointRecord, CheckpointScores
from swarm.core.canonical import pack
from swarm.core.ids import PeerId
from swarm.core.settings import TensorKind
from verification.audit.evidence import SUFFIX
from verification.audit.verdicts import Ban, Quarantine
from verification.replay.evidence_file import SignedVerdict

MAX_POINTS = 400
MAX_LEADERS = 50
MAX_BANS = 50
MAX_NOTICES = 20
MAX_SCORES = 100
MAX_NOTICE_PEERS = 8
NAMED_BY = 16
"""Letters of a digest in the name of the evidence's file."""

Point = TypeVar("Point")
_PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}


class Dashboard(Collector):
    """What `swarm.network.services.web_site` asks for."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._run = host.run
        folder = importlib.resources.files("bootstrap") / "page"
        self.pages = {path: (kind, (folder / name).read_bytes()) for path, (name, kind) in _PAGES.items()}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # -- the page -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        progress, books, settings = self._host.progress, self._host.books, self._run.settings
        return {
            "name": settings.name,
            "run_id": self._run.run_id,
            "run_key": self._run.run_key.peer_id,
            "version": progress.done_versions(),
            "total_steps": settings.optimizer.total_steps,
            "local_steps": settings.averaging.local_steps,
            "begun": self._host.has_begun,
            "waits_for": self._host.waits_for,
            "amendments": self._host.amending.history,
            "tokens": progress.tokens,
            "tokens_per_s": progress.recent_tokens_per_s(),
            "loss": thinned([[n, figures.loss_sum / figures.num_targets] for n, figures in self._told()]),
            "held_out": thinned([[version, loss] for version, loss in sorted(books.held_out.items())]),
            "reference": thinned(self._reference()),
            "speed": thinned(self._speeds()),
            "scores": self._scores(),
            "stages": self._stages(),
            "leaders": [
                {
                    "rank": rank,
                    "peer": peer,
                    "tokens": credit.num_tokens,
                    "microbatches": credit.num_microbatches,
                    "steps": credit.num_steps,
                }
                for rank, (peer, credit) in enumerate(books.leaders(MAX_LEADERS), start=1)
            ],
            "shut_out": self._shut_out(),
            "audits": [pair.to_json() for pair in spread_by_pair(progress.audits_made())],
            "bounds": {kind: settings.audits.bounds_factor(kind) for kind in get_args(TensorKind)},
            "notices": self._notices(),
            "checkpoints": self._checkpoints(),
        }

    def _told(self) -> list[tuple[int, StepFigures]]:
        """Steps whose loss is known."""
        progress = self._host.progress
        done = progress.done_versions()
        return [(n, figures) for n, figures in sorted(progress.steps.items()) if figures.num_targets and n < done]

    def _reference(self) -> list[list[float]]:
        """[version, loss of the reference at as many tokens], if the host has one."""
        reference, trained = self._host.settings.reference, self._host.trained
        if reference is None:
            return []
        told = [(version, reference.loss_at(trained.at(version))) for version in trained.versions()]
        return [[version, loss] for version, loss in told if loss is not None]

    def _scores(self) -> list[dict[str, Any]]:
        """The newest checkpoint's first."""
        tried = [CheckpointScores.from_value(facts) for _, facts in sorted(self._host.books.scores.items())]
        return [
            {"version": one.version, "task": score.task, "metric": score.metric, "value": score.value}
            for one in reversed(tried)
            for score in one.scores
        ][:MAX_SCORES]

    def _speeds(self) -> list[list[float]]:
        """[step, tokens/s] of each step that follows another."""
        ends = [
            (n, figures.finished_at, figures.tokens)
            for n, figures in sorted(self._host.progress.steps.items())
            if figures.finished_at is not None
        ]
        return [
            [n, tokens / (at - before)] for (_, before, _), (n, at, tokens) in itertools.pairwise(ends) if at > before
        ]

    def _stages(self) -> list[dict[str, Any]]:
        progress, missing = self._host.progress, self._host.missing()
        stages: list[dict[str, Any]] = []
        for stage in range(progress.num_stages):
            present = progress.present(stage=stage)
            told = [last for peer in present if (last := progress.peers[peer].last) is not None]
            busy = [share for peer in present if (share := self._busy(peer)) is not None]
            stages.append(
                {
                    "stage": stage,
                    "version": self._version(stage),
                    "replicas": len(present),
                    "missing": missing.get(stage, 0),
                    "busy": fmean(busy) if busy else None,
                    "bottleneck": False,
                    "links": [
                        sum(last.num_direct for last in told),
                        sum(last.num_punched for last in told),
                        sum(last.num_relayed for last in told),
                    ],
                }
            )
        measured = [entry for entry in stages if entry["busy"] is not None]
        if len(measured) > 1:
            max(measured, key=lambda entry: entry["busy"])["bottleneck"] = True
        return stages

    def _version(self, stage: int) -> int:
        return self._host.books.versions.get(stage, (self._run.version, b""))[0]

    def _busy(self, peer: PeerId) -> float | None:
        """Share of its time here in which the peer computed; None before its first report."""
        figures = self._host.progress.peers[peer]
        there_s = figures.last_heard - figures.admitted_at
        return None if figures.last is None or there_s <= 0 else min(1.0, figures.last.busy_s / there_s)

    def _shut_out(self) -> list[dict[str, Any]]:
        """The newest, oldest first: whoever likes gets keys of his banned, and only these are looked at."""
        verdicts = reversed(self._host.books.verdicts.items())
        newest = ((peer, kind, facts) for peer, held in verdicts for kind, facts in reversed(held.items()))
        kept, found = self._kept_evidence(), []
        for peer, kind, facts in itertools.islice(newest, MAX_BANS):
            charge: Any = facts["value"]  # type: ignore[call-overload,index]
            digest = charge["evidence_digest"].hex()
            found.append(
                {
                    "peer": peer,
                    "verdict": kind,
                    "kind": charge["kind"],
                    "stage": charge["stage"],
                    "step": charge["version"],
                    "evidence": digest if digest[:NAMED_BY] in kept else None,
                }
            )
        return found[::-1]

    def _notices(self) -> list[dict[str, Any]]:
        """The newest first."""
        newest = itertools.islice(reversed(self._host.notices), MAX_NOTICES)
        return [
            {
                "kind": notice.kind,
                "step": notice.step,
                "stage": notice.stage,
                "reason": notice.reason,
                "peers": list(notice.peers[:MAX_NOTICE_PEERS]),
                "num_peers": len(notice.peers),
                "num_microbatches": len(notice.ids),
            }
            for notice in newest
        ]

    def evidence(self, digest: str) -> Path | None:
        """File of the evidence of this digest."""
        return self._kept_evidence().get(digest[:NAMED_BY])

    def _kept_evidence(self) -> dict[str, Path]:
        """By the digests' first letters."""
        files = sorted((self._run.folder.root / "evidence").glob(f"*{SUFFIX}"))
        return {path.stem.rpartition("-")[2]: path for path in files}

    def word(self, peer: str) -> bytes | None:
        """What the run key has signed of a peer that is out, beside the settings it has signed."""
        held = self._host.books.verdicts.get(PeerId(peer), {})
        if "ban" in held:
            return SignedVerdict(self._run.signed, Ban.from_value(held["ban"])).to_bytes()
        if "quarantine" in held:
            return SignedVerdict(self._run.signed, Quarantine.from_value(held["quarantine"])).to_bytes()
        return None

    def audits_made(self) -> list[str]:
        """What each member has signed on its audits of honest work, in base64."""
        words = self._host.progress.audits_made()
        return [base64.b64encode(pack(word.to_value())).decode("ascii") for word in words]

    def _checkpoints(self) -> list[dict[str, Any]]:
        found = []
        for version, value in sorted(self._host.books.checkpoints.items(), reverse=True):
            if checkpoint_path(self._run.folder.checkpoints, version).is_dir():
                record = CheckpointRecord.from_value(value)
                files = [{"name": file.name, "bytes": file.size_bytes} for file in record.files]
                found.append({"version": version, "anchored": record.anchored, "files": files})
        return found

    def checkpoint_file(self, version: int, name: str) -> Path | None:
        value = self._host.books.checkpoints.get(version)
        if value is None or all(file.name != name for file in CheckpointRecord.from_value(value).files):
            return None
        path = checkpoint_path(self._run.folder.checkpoints, version) / name
        return path if path.is_file() else None

    # -- Prometheus ---------------------------------------------------------------------------------------

    def metrics(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        progress, books = self._host.progress, self._host.books
        labels = {"run": self._run.settings.name}

        def gauge(name: str, meaning: str, value: float | None) -> Iterator[Metric]:
            if value is not None:
                family = GaugeMetricFamily(f"homeswarm_{name}", meaning, labels=list(labels))
                family.add_metric(list(labels.values()), value)
                yield family

        def counter(name: str, meaning: str, value: float) -> Iterator[Metric]:
            family = CounterMetricFamily(f"homeswarm_{name}", meaning, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family

        yield from gauge("version", "Version that every stage has reached.", progress.done_versions())
        yield from gauge("steps_planned", "Steps of the whole run.", self._run.settings.optimizer.total_steps)
        yield from counter("tokens", "Target tokens that certified results trained on.", progress.tokens)
        yield from gauge("tokens_per_second", "Over the last finished steps.", progress.recent_tokens_per_s())
        yield from gauge("training_loss", "Of the last reported step, nats a token.", progress.last_loss())
        held_out = books.held_out[max(books.held_out)] if books.held_out else None
        yield from gauge("held_out_loss", "Of the last evaluation, nats a token.", held_out)
        last = progress.steps.get(progress.done_versions() - 1)
        yield from gauge("round_seconds", "Of the slowest stage's last round.", last.round_s if last else None)
        yield from counter("ledger_events", "Events in the host's ledger.", books.num_events)
        yield from gauge("identities", "Peers that were ever admitted.", len(books.peers))
        yield from gauge("shut_out", "Peers that are banned or quarantined.", sum(map(bool, books.verdicts.values())))
        yield from gauge("checkpoints", "Checkpoints that are kept.", len(self._checkpoints()))
        yield from gauge("time_seconds", "The host's clock, seconds since 1970.", time.time())
        if self._host.relay is not None:
            relay = self._host.relay.report()
            yield from counter("relayed_bytes", "Carried between peers that cannot be dialled.", relay["carried_bytes"])
            yield from gauge("relay_budget_bytes", "At which the relay ends.", relay["budget_bytes"])
        for name, meaning in (("version", "Version of the stage."), ("replicas", "Peers that are present.")):
            family = GaugeMetricFamily(f"homeswarm_stage_{name}", meaning, labels=[*labels, "stage"])
            for stage in self._stages():
                family.add_metric([*labels.values(), str(stage["stage"])], stage[name])
            yield family
        notices = CounterMetricFamily("homeswarm_notices", "What went wrong in training.", labels=[*labels, "kind"])
        for one in KINDS:
            notices.add_metric([*labels.values(), one], self._host.noticed[one])
        yield notices
        screens = CounterMetricFamily("homeswarm_screens", "Screens that tripped.", labels=[*labels, "kind"])
        for kind, count in progress.screens().items():
            screens.add_metric([*labels.values(), kind], count)
        yield screens


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS of them, evenly, the first and the last among them."""
    if len(points) <= MAX_POINTS:
        return list(points)
    return [points[round(index * (len(points) - 1) / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]
