"""What the user asked of the demo, checked before anything starts, and the run's manifest it makes."""

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from swarm.attacks import Attack
from swarm.core.errors import SettingsError
from swarm.core.pipeline.data_order import DataOrder
from swarm.data.prepare import PreparedData, prepare_data
from swarm.manifest.tables import DataTable
from swarm.model.presets import preset_config

PRESET = "tiny"
DEFAULT_OUT = Path("demo-out")
SNAPSHOT_EVERY = 8
CHECKPOINT_EVERY = 16
KILL_AT_SHARE = 0.4
"""Where nothing else is asked, one peer is killed at this share of the run."""

BATCH_TOKENS = 2048
MICROBATCH_SIZE = 4
SEQUENCE_LENGTH = 128
CHUNK_TOKENS = MICROBATCH_SIZE * (SEQUENCE_LENGTH + 1)
"""One microbatch: neighbouring text is then spread over the whole run, and every step sees some of everything."""
LEARNING_RATE = 3e-3
WARMUP_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Kill:
    """So many peers are killed when the run reaches a step."""

    peers: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Attackers:
    """So many peers misbehave in one way from a step on."""

    attack: Attack
    peers: int

    def __str__(self) -> str:
        return f"{self.attack.kind}:{self.peers}@{self.attack.from_step}"


@dataclass(frozen=True, kw_only=True)
class DemoRequest:
    """A demo, as asked for. `checked` makes one that can be run."""

    stages: int
    peers: int
    steps: int
    kill: Kill
    attacks: tuple[Attackers, ...] = ()
    text: tuple[Path, ...] = ()
    seed: int = 0
    delay: int = 0
    local_steps: int = 1
    threads: int = 1
    out: Path
    report: Path | None = None

    @property
    def batch_tokens(self) -> int:
        """Of a step; of each peer's inner step, where it takes such, its part of that."""
        if self.local_steps == 1:
            return BATCH_TOKENS
        microbatch = MICROBATCH_SIZE * SEQUENCE_LENGTH
        return microbatch * max(1, BATCH_TOKENS // self.peers // microbatch)

    @property
    def tokens_per_step(self) -> int:
        """Of all peers, if none is killed."""
        return self.batch_tokens * (self.local_steps * self.peers if self.local_steps > 1 else 1)

    @property
    def shape(self) -> str:
        """In words."""
        if self.stages > 1:
            return f"{self.peers} peers in {self.stages} stages"
        windows = f", in windows of {self.local_steps} local steps" if self.local_steps > 1 else ""
        return f"{self.peers} peers, the whole model on each{windows}"

    @property
    def peers_per_stage(self) -> int:
        return self.peers // self.stages

    def stage_of(self, peer: int) -> int:
        """Peers are dealt out to the stages in turn."""
        return peer % self.stages

    def victims(self) -> list[int]:
        """Peers to kill: each time the last of the stage that has most left, the last such stage."""
        left = self._peers_by_stage()
        found = []
        for _ in range(self.kill.peers):
            stage = max(left, key=lambda stage: (len(left[stage]), stage))
            found.append(left[stage].pop())
        return found

    def attackers(self) -> dict[int, Attack]:
        """Peers that misbehave, chosen as victims are among those that are not killed.

        Raises SettingsError if a stage would be without an honest peer that lives.
        """
        killed = set(self.victims())
        left = {
            stage: [peer for peer in peers if peer not in killed] for stage, peers in self._peers_by_stage().items()
        }
        found: dict[int, Attack] = {}
        for asked in self.attacks:
            for done in range(asked.peers):
                stages = [
                    stage
                    for stage, peers in left.items()
                    if len(peers) > 1 and asked.attack.works_in(stage, self.stages)
                ]
                if not stages:
                    raise SettingsError(
                        f"--attack {asked}: there is no peer for {asked.peers - done} of them: a stage must keep an "
                        "honest peer that is not killed, and some kinds attack some stages only; add --peers, or "
                        "give fewer"
                    )
                stage = max(stages, key=lambda stage: (len(left[stage]), stage))
                found[left[stage].pop()] = asked.attack
        return found

    def _peers_by_stage(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {stage: [] for stage in range(self.stages)}
        for peer in range(self.peers):
            found[self.stage_of(peer)].append(peer)
        return found


@dataclass(frozen=True)
class Folder:
    """Paths of one demo."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "run.toml"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def data(self) -> Path:
        """Where the host looks for the run's token files."""
        return self.run / "data"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def events(self) -> Path:
        """What the host said, a JSON object a line, `at_s` seconds after the demo began."""
        return self.logs / "events.jsonl"

    @property
    def address(self) -> Path:
        """What `swarm join` needs, while the run lasts."""
        return self.root / "address"

    @property
    def host_report(self) -> Path:
        return self.run / "report.json"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def plot(self) -> Path:
        return self.root / "loss.png"

    @property
    def model(self) -> Path:
        return self.root / "model"

    def peer(self, number: int) -> Path:
        return self.root / "peers" / str(number)


@dataclass(frozen=True)
class PreparedDemo:
    """A demo that can start: its manifest is written and its text is read."""

    request: DemoRequest
    folder: Folder
    data: PreparedData


def parse_kill(text: str | None, steps: int) -> Kill:
    """`N@STEP`; None means one peer at KILL_AT_SHARE of the run. Raises SettingsError."""
    if text is None:
        return Kill(peers=1, step=max(1, round(steps * KILL_AT_SHARE)))
    match = re.fullmatch(r"(\d{1,6})@(\d{1,9})", text)
    if match is None:
        raise SettingsError(f"--kill {text}: give N@STEP, such as 1@{max(1, round(steps * KILL_AT_SHARE))}, or 0@0")
    return Kill(peers=int(match[1]), step=int(match[2]))


def parse_attackers(text: str) -> Attackers:
    """`KIND:COUNT@STEP`. Raises SettingsError."""
    match = re.fullmatch(r"([a-z0-9_]+):(\d{1,6})@(\d{1,9})", text)
    if match is None:
        raise SettingsError(f"--attack {text}: give KIND:COUNT@STEP, such as sign_flip:1@10")
    try:
        return Attackers(attack=Attack(match[1], int(match[3])), peers=int(match[2]))
    except SettingsError as error:
        raise SettingsError(f"--attack {error}") from error


def default_out() -> Path:
    """A folder that is not there yet."""
    return DEFAULT_OUT / time.strftime("%Y%m%d-%H%M%S")


def check(request: DemoRequest) -> DemoRequest:
    """The request with absolute paths. Raises SettingsError if it cannot be run; nothing is written."""
    num_layers = preset_config(PRESET, 256)["num_hidden_layers"]
    if request.stages > num_layers:
        raise SettingsError(f"--stages {request.stages}: the model has {num_layers} layers; give at most {num_layers}")
    if request.peers < request.stages:
        raise SettingsError(
            f"--peers {request.peers}: each of {request.stages} stages needs a peer; give --peers {request.stages} "
            "or more, or fewer --stages"
        )
    if request.local_steps > 1 and (request.stages > 1 or request.delay):
        raise SettingsError(f"--local-steps {request.local_steps}: goes with --stages 1 and --delay 0")
    _check_kill(request)
    _check_attacks(request)
    for path in request.text:
        if not path.exists():
            raise SettingsError(f"--text {path}: is neither a file nor a folder; correct the path")
        if not os.access(path, os.R_OK):
            raise SettingsError(f"--text {path}: cannot be read (Permission denied); change its mode or name another")
    _check_out(request.out)
    if request.report is not None:
        _check_report(request.report)
    return replace(
        request,
        text=tuple(path.absolute() for path in request.text),
        out=request.out.absolute(),
        report=request.report and request.report.absolute(),
    )


def prepare(request: DemoRequest) -> PreparedDemo:
    """Make the folder, the manifest and the token files. Raises SettingsError, with nothing left behind."""
    manifest = manifest_text(request)
    folder = Folder(request.out)
    made = [path for path in (folder.root, *folder.root.parents) if not path.exists()]
    try:
        for path in (folder.logs, folder.data):
            path.mkdir(parents=True)
        folder.manifest.write_text(manifest, encoding="utf-8")
        return PreparedDemo(request, folder, _read_text(request, folder))
    except BaseException as error:
        for path in [*folder.root.iterdir()] if folder.root.is_dir() else []:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with contextlib.suppress(OSError):  # somebody else may have begun to use one
            for path in made:
                path.rmdir()
        if isinstance(error, OSError):
            raise SettingsError(
                f"--out {request.out}: cannot be written ({error.strerror}); choose another folder"
            ) from error
        raise


def _read_text(request: DemoRequest, folder: Folder) -> PreparedData:
    """Write the token files where the host finds them. Raises SettingsError if the text is too short."""
    table = DataTable(
        text=tuple(str(path) for path in request.text),
        sequence_length=SEQUENCE_LENGTH,
        chunk_tokens=CHUNK_TOKENS,
        seed=request.seed,
    )
    named = f"--text {' '.join(map(str, request.text))}"
    try:
        data = prepare_data(table, folder.data)
    except SettingsError as error:
        raise SettingsError(f"{named}: {error}") from error
    try:
        DataOrder(data.num_train_tokens, SEQUENCE_LENGTH, MICROBATCH_SIZE, CHUNK_TOKENS, request.seed)
    except ValueError as error:
        raise SettingsError(
            f"{named}: {data.num_train_tokens} bytes to train on are less than a microbatch of {CHUNK_TOKENS}; add text"
        ) from error
    return data


def manifest_text(request: DemoRequest) -> str:
    """The run's TOML: what `swarm host` reads, and what a user may copy and change."""
    texts = ", ".join(_toml_string(str(path)) for path in request.text)
    return f"""\
# The run of this demo. `swarm init` writes a manifest in which every field is explained.

[run]
name = "demo"
trust = "{"public" if request.attacks else "friends"}"

[model]
preset = "{PRESET}"
stages = {request.stages}

[data]
# Empty: the source code of Python's standard library.
text = [{texts}]
sequence_length = {SEQUENCE_LENGTH}
# One microbatch: neighbouring text is then spread over the whole run, and every step sees some of everything.
chunk_tokens = {CHUNK_TOKENS}
seed = {request.seed}

[batch]
microbatch_size = {MICROBATCH_SIZE}
target_tokens = {request.batch_tokens}

[optimizer]
learning_rate = {LEARNING_RATE}
warmup_steps = {round(request.steps * WARMUP_SHARE)}
total_steps = {request.steps}

[codecs]
activations = "int8"
activation_gradients = "int8"
averaging = "{"int2" if request.local_steps > 1 else "int8"}"

[averaging]
rule = "centered_clip"
delay = {request.delay}
local_steps = {request.local_steps}

[checkpoint]
snapshot_every = {SNAPSHOT_EVERY}
every_steps = {CHECKPOINT_EVERY}

[limits]
founders_per_stage = {request.peers_per_stage}
"""


def _check_kill(request: DemoRequest) -> None:
    kill = request.kill
    asked = f"--kill {kill.peers}@{kill.step}"
    if kill.peers == 0:
        return
    most = request.peers - request.stages
    if kill.peers > most:
        remedy = f"give at most {most}@{kill.step}" if most else "add peers with --peers, or give 0@0"
        raise SettingsError(
            f"{asked}: each of {request.stages} stages must keep a peer, and there are {request.peers}; {remedy}"
        )
    if not 1 <= kill.step < request.steps:
        raise SettingsError(f"{asked}: the run has {request.steps} steps; give a step from 1 to {request.steps - 1}")


def _check_attacks(request: DemoRequest) -> None:
    for asked in request.attacks:
        if asked.attack.from_step >= request.steps:
            raise SettingsError(
                f"--attack {asked}: the run has {request.steps} steps; give a step from 0 to {request.steps - 1}"
            )
    request.attackers()


def _check_out(out: Path) -> None:
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise SettingsError(f"--out {out}: is not an empty folder; give a new one, nothing is overwritten")
        above = out.absolute()
        while not above.exists():
            above = above.parent
    except OSError as error:
        raise SettingsError(f"--out {out}: cannot be looked at ({error.strerror}); choose another folder") from error
    if not above.is_dir():
        raise SettingsError(f"--out {out}: {above} is no folder; choose another")
    if not os.access(above, os.W_OK | os.X_OK):
        raise SettingsError(f"--out {out}: {above} cannot be written (Permission denied); choose another folder")


def _check_report(report: Path) -> None:
    above = report.absolute().parent
    if not above.is_dir():
        raise SettingsError(f"--report {report}: its folder does not exist; create it or choose another path")
    if report.is_dir():
        raise SettingsError(f"--report {report}: is a folder; give a file's name")
    if not os.access(report if report.exists() else above, os.W_OK):
        raise SettingsError(f"--report {report}: cannot be written (Permission denied); choose another path")


def _toml_string(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"--text {text!r}: the path is not UTF-8; rename it, or link to it by another name") from (
            error
        )
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
