"""What README and docs tell hosts, volunteers and those who take the model away to type, in one small run."""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bootstrap.state.run_folder import prepare_run
from bootstrap.tracking.tensorboard import last_steps
from swarm.cli import ExitCode
from swarm.manifest.file import read_manifest
from tests.process_swarm import ProcessSwarm, Zygote

COMMAND_S, WATCH_S = 120.0, 3.0

BEFORE = (
    "swarm init run.toml",
    "swarm plan run.toml --uplink-mbit 20",
    "swarm plan run.toml --peers 4 --tflops 1 --session-hours 1000",
)
HOSTED = (
    "swarm host --minimum-release 0.2.0",
    "swarm host run.toml",
    "swarm host run.toml --listen :4001",
    "swarm host run.toml --listen :4001 --public swarm.example.org",
    "swarm host run.toml --reference FILE",
    "swarm host run.toml --track tensorboard:DIR",
)
"""One host runs, with all these options and values that suit this machine."""
JOINED = (
    "swarm join 'swarm://...' --detach",
    "swarm join 'swarm://203.0.113.7:4002/my-run#mAEBx...'",
    "swarm join INVITE",
)
"""One of two peers is detached."""
OF_THE_PEER = (
    "swarm status",
    "swarm pause",
    "swarm resume",
    "swarm config upload-mbit 10",
    "swarm config relay-gb 20",
    "swarm doctor 'swarm://...'",
    "swarm install-service 'swarm://...'",
)
AMENDED = ("swarm amend FOLDER --set optimizer.total_steps=4000 --set optimizer.learning_rate=3e-4",)
WATCHED = ("swarm top", "swarm logs -f", "swarm seed INVITE --listen :4001 --public seed.example.org")
"""They go on until Ctrl-C."""
OF_THE_HOST = (
    "swarm invite show LINE",
    "swarm ticket create FOLDER --uses 3 --days 14",
    "swarm ticket list",
    "swarm ticket revoke",
    "swarm peers 'swarm://...'",
    "swarm rollback run --yes",
)
TAKEN_AWAY = ("swarm pull 'swarm://...' model", "swarm export run/checkpoints model", 'swarm generate model "def "')
SAID_TWICE = (
    "swarm amend run --set optimizer.total_steps=4000",
    "swarm amend FOLDER --set audits.contribution_bounds=1.5",
    "swarm peers INVITE",
    "swarm pull INVITE model",
    "swarm rollback FOLDER --yes",
    "swarm seed 'swarm://...'",
)
AT_THE_END = ("swarm leave",)
OF_A_RUN = (
    *(*BEFORE, *HOSTED, *JOINED, *OF_THE_PEER, *WATCHED),
    *(*OF_THE_HOST, *AMENDED, *TAKEN_AWAY, *SAID_TWICE, *AT_THE_END),
)

WITH_A_FOLDER = ("status", "pause", "resume", "config", "doctor", "install-service", "top", "logs", "leave", "join")
MORE_WORDS = {
    "list": ["run"],
    "revoke": ["run", "VOUCHER"],
    "install-service": ["--print"],
    "join": ["--yes", "--listen", "127.0.0.1:0", "--threads", "1", "--nice", "0", "--stage", "1"],
    "amend": ["--yes"],
    "rollback": ["--skip", "none"],  # nothing has gone wrong here
    "generate": ["--max-new-tokens", "4"],
}


def made_folder_of_a_run(folder: Path) -> None:
    """As a host leaves it that has recorded one microbatch of one step."""
    manifest = folder.parent / "run.toml"
    folder.parent.mkdir(parents=True)
    manifest.write_text('[model]\npreset = "tiny"\n[data]\nmax_text_mb = 1\n')
    prepare_run(read_manifest(manifest), folder, lambda what: None)
    (folder / "report.json").write_text(json.dumps({"microbatches": {"0": [0]}}))


@dataclass
class User:
    """Types commands in a folder in which `run` is the host's and `peer` the volunteer's."""

    zygote: Zygote
    folder: Path
    invite: str = ""
    voucher: str = ""
    typed: int = 0

    def words(self, command: str) -> list[str]:
        verb, *rest = shlex.split(command)[1:]
        words = [self.invite if re.match(r"swarm://|INVITE$|LINE$", word) else word for word in rest]
        words = ["run" if word == "FOLDER" else word for word in words]
        for option, value in (("--listen", "127.0.0.1:0"), ("--public", "127.0.0.1")):
            if option in words:
                words[words.index(option) + 1] = value
        more = MORE_WORDS.get(rest[0] if verb == "ticket" else verb, [])
        more = [self.voucher if word == "VOUCHER" else word for word in more]
        if verb == "export":
            words[-1] = "exported"  # the other command's model is there
        return [verb, *words, *(["--dir", "peer"] if verb in WITH_A_FOLDER else []), *more]

    def begins(self, command: str) -> tuple[int, Path]:
        self.typed += 1
        log = self.folder / f"{self.typed}.log"
        return self.zygote.start(self.words(command), log, cwd=self.folder), log

    def types(self, command: str) -> str:
        """What it says; it must end well."""
        pid, log = self.begins(command)
        code = self.zygote.exit_code(pid, timeout_s=COMMAND_S)
        said = log.read_text()
        assert code == ExitCode.OK, f"{command} ended with {code}: {said[-3000:]}"
        return said

    def watches(self, command: str) -> None:
        """It goes on until Ctrl-C."""
        pid, log = self.begins(command)
        time.sleep(WATCH_S)
        assert not self.zygote.has_ended(pid), f"{command} has ended: {log.read_text()[-3000:]}"
        os.kill(pid, signal.SIGINT)
        try:
            code = self.zygote.exit_code(pid, timeout_s=COMMAND_S)
        except AssertionError as error:
            raise AssertionError(f"{command} does not end by Ctrl-C: {log.read_text()[-3000:]}") from error
        assert code in (ExitCode.OK, ExitCode.INTERRUPTED), f"{command} ended with {code}: {log.read_text()[-3000:]}"

    def types_all(self, commands: Sequence[str]) -> None:
        for command in commands:
            self.types(command)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_run_is_hosted_joined_watched_and_taken_away_as_the_pages_say(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "typed"
    folder.mkdir()
    user = User(zygote, folder)
    user.types_all(BEFORE)
    with ProcessSwarm(zygote, tmp_path, founders=1, min_replicas=1, steps=5000, target_tokens=256, slow_s=0.1) as swarm:
        board, reference = tmp_path / "board", tmp_path / "reference.csv"
        reference.write_text("tokens,loss\n0,6.0\n1000000,1.0\n")
        watching = ("--track", f"tensorboard:{board}", "--reference", str(reference))
        swarm.start_host("--public", "127.0.0.1", "--minimum-release", "0.0.1", *watching)
        listening = swarm.wait_for("listening")
        user.invite = listening["invite"]
        (folder / "run").symlink_to(tmp_path / "host")
        swarm.start_peer("p0a", 0)
        user.types("swarm join 'swarm://...' --detach")
        try:
            user.types_all(("swarm invite show LINE", "swarm ticket create FOLDER --uses 3 --days 14"))
            user.voucher = user.types("swarm ticket list").split()[0]
            user.types("swarm ticket revoke")
            swarm.wait_for("checkpoint")
            user.types_all(TAKEN_AWAY)
            user.types("swarm peers 'swarm://...'")
            user.types_all(OF_THE_PEER)
            for command in WATCHED:
                user.watches(command)
            user.types("swarm rollback run --yes")
            user.types_all(AMENDED)
            assert last_steps(board / listening["run_id"][:12])["training_loss"] > 0
        finally:
            user.types_all(AT_THE_END)
