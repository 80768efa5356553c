"""A run on the host's disk, and how it is made ready: keys, token files, initial or archived states."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bootstrap.program.ledger import Ledger
from bootstrap.state.remote_archive import ArchivePlace, RemoteArchive
from swarm.checkpoint.archive import CheckpointInfo, finish_sealed, latest_checkpoint, load_stage, remove_leftovers
from swarm.checkpoint.huggingface import copy_tokenizer
from swarm.checkpoint.parent import PARENT, keep_parent
from swarm.checkpoint.recut import recut
from swarm.checkpoint.state import UNNAMED, StageState, chunk_hash, state_chunks, state_digest
from swarm.core.canonical import unpack
from swarm.core.errors import SettingsError
from swarm.core.ids import RunId
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.settings import RunSettings
from swarm.core.state.result_size import most_members
from swarm.core.state.stage_chain import Genesis
from swarm.data.known_tokens import known_data, take_known_tokens
from swarm.data.piece_store import WholeFile
from swarm.data.pieces import list_pieces
from swarm.data.prepare import PreparedData, prepare_data
from swarm.data.tokenizer import BYTES
from swarm.disk.mapped_file import mapped
from swarm.disk.whole_file import whole_file
from swarm.identity.key import Identity
from swarm.manifest.file import Manifest, check_text_is_there, freeze
from swarm.manifest.signed_run import MAX_SETTINGS_BYTES, Amendment, SignedRun
from swarm.manifest.value import run_id, settings_bytes, settings_from_value
from swarm.model.adapters.making import write_base
from swarm.model.initial import initial_weights
from swarm.model.stack import stage_layout
from swarm.network.identity_file import load_or_create_identity
from swarm.network.transport import MAX_META_BYTES
from swarm.optim.stage_step import first_state, stage_num_parts
from verification.audit.coverage import check_proved

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def settings(self) -> Path:
        return self.root / "run.settings"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.sqlite"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def parent(self) -> Path:
        """What is kept of the checkpoint that the run began from."""
        return self.root / PARENT

    @property
    def base(self) -> Path:
        """The frozen base that adapters stand on, if they are what is trained."""
        return self.root / "model.base"

    @property
    def tokenizer(self) -> Path:
        """A copy of the run's, for its checkpoints: what the manifest names may go while the run is on."""
        return self.root / "run.tokenizer"

    @property
    def first_weights(self) -> Path:
        """Those of version 0, a file for each stage."""
        return self.root / "first-weights"


@dataclass
class PreparedRun:
    """A run that can be served."""

    folder: RunFolder
    settings: RunSettings
    """In force."""
    run_id: RunId
    host_key: Identity
    run_key: Identity
    signed: SignedRun
    data: PreparedData
    states: list[StageState]
    """Where the stages begin: version 0, or the latest checkpoint's."""
    leases: LeaseTable
    base: WholeFile | None = None
    """The frozen base; None where the whole model is trained."""
    tokenizer: Path | None = None
    """The folder of the tokenizer's copy; None for bytes."""
    parent: Path | None = None
    """What is kept of the checkpoint that the run began from, if it did."""
    archive: RemoteArchive | None = None
    """Where checkpoints are kept besides the folder, if anywhere."""
    hashes: list[tuple[bytes, ...]] = field(init=False)
    """Of the chunks of each state. Of several GB they take seconds: they are made with the run, where nobody waits."""

    def __post_init__(self) -> None:
        self.hashes = [tuple(map(chunk_hash, state_chunks(state))) for state in self.states]

    @property
    def version(self) -> int:
        return self.states[0].version


def prepare_run(
    manifest: Manifest, root: Path, say: Callable[[str], None], place: ArchivePlace | None = None
) -> PreparedRun:
    """Make the run's folder ready, or take up the run that is in it, from a newer checkpoint at `place` if there is.

    Raises SettingsError if the folder cannot be written or holds another run, LocalError if
    `place` does not answer.
    """
    folder = RunFolder(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SettingsError(f"--dir {root}: cannot be written ({error.strerror}); choose another folder") from error
    _clear(folder)
    known = _known_settings(folder)
    run_key = load_or_create_identity(root / "run.key")
    if known is not None:
        settings = known
        data = known_data(manifest.data, settings.data, folder.data)
        base = _base(folder, manifest, say, anew=False)
        is_the_same = len(data.mixture) == len(manifest.data.mixture) == len(settings.data.mixture)
        if not is_the_same or freeze(manifest, data, settings.initial_state_digests, _digest(base)) != settings:
            held = run_id(settings, run_key.peer_id)
            raise SettingsError(f"--dir {root}: holds the run {held[:12]} with other settings; choose another folder")
        take_known_tokens(manifest.data, data, say)
        tokenizer = _tokenizer(folder, manifest, anew=False)
        if place is not None:
            _fetch_newer(RemoteArchive(place, run_id(settings, run_key.peer_id), run_key.peer_id), folder, say)
        signed = _signed(folder, settings, run_key)
        states, leases = _resume(folder, signed, manifest, say)
    else:
        check_text_is_there(manifest)
        named = manifest.data.text or manifest.data.mixture
        say(f"reading {'text' if named else 'the source code of Python, for data.text names nothing'} ...")
        data = prepare_data(manifest.data, folder.data, say)
        tokenizer = _tokenizer(folder, manifest, anew=True)
        base = _base(folder, manifest, say, anew=True)
        settings = freeze(manifest, data, (), _digest(base))
        check_proved(settings)
        check_rates(settings)
        states = _initial_states(folder, settings, manifest, say)
        check_stage_sizes(settings)
        settings = replace(settings, initial_state_digests=tuple(state_digest(state) for state in states))
        leases = LeaseTable()
        if manifest.initial_checkpoint is not None:
            keep_parent(manifest.initial_checkpoint, folder.parent)
        _write_settings(folder, settings)
        signed = _signed(folder, settings, run_key)
    settings = signed.in_force
    return PreparedRun(
        folder,
        settings,
        signed.run_id,
        load_or_create_identity(root / "host.key"),
        run_key,
        signed,
        data,
        states,
        leases,
        base,
        tokenizer,
        folder.parent if folder.parent.is_dir() else None,
        None if place is None else RemoteArchive(place, signed.run_id, run_key.peer_id),
    )


def _base(folder: RunFolder, manifest: Manifest, say: Callable[[str], None], *, anew: bool) -> WholeFile | None:
    """The frozen base and the list of its pieces; made now if that is asked for, or if it is not there.

    Raises SettingsError as `write_base`.
    """
    if not manifest.model.has_base:
        return None
    if anew or not folder.base.exists():
        say("making the frozen base ...")
        write_base(manifest.model, folder.base, manifest.data.seed, manifest.initial_checkpoint)
    return WholeFile(folder.base, list_pieces(folder.base))


def _tokenizer(folder: RunFolder, manifest: Manifest, *, anew: bool) -> Path | None:
    """The copy of the tokenizer; made now if that is asked for, or if it is not there. None for bytes."""
    if manifest.data.tokenizer == BYTES:
        return None
    if anew or not folder.tokenizer.exists():
        partial = folder.tokenizer.with_name(folder.tokenizer.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        copy_tokenizer(Path(manifest.data.tokenizer), partial)
        shutil.rmtree(folder.tokenizer, ignore_errors=True)
        partial.rename(folder.tokenizer)
    return folder.tokenizer


def _digest(base: WholeFile | None) -> bytes | None:
    return None if base is None else base.pieces.digest


def _signed(folder: RunFolder, settings: RunSettings, run_key: Identity) -> SignedRun:
    """With the amendments that the ledger has. Raises LocalError if it cannot be read."""
    return SignedRun(settings_bytes(settings), run_key.peer_id, _amendments(folder)).signed_by(run_key)


def _amendments(folder: RunFolder) -> tuple[Amendment, ...]:
    """Those in force, in order."""
    if not folder.ledger.exists():
        return ()
    ledger = Ledger(folder.ledger)
    try:
        return tuple(Amendment.from_value(event.facts) for event in ledger.events("amendment"))
    finally:
        ledger.close()


def _clear(folder: RunFolder) -> None:
    """Nothing that a host wrote when it was killed stays but the states that the run begins again from: where its
    ledger names them they are a checkpoint."""
    geneses = _geneses(folder)
    if geneses:
        digests = [genesis.state_digest for genesis in geneses]
        if finish_sealed(folder.checkpoints, int(geneses[0].version), digests) is not None:
            log.info("version %d, from which the run goes on, was written and not visible yet", geneses[0].version)
    remove_leftovers(folder.checkpoints)


def _geneses(folder: RunFolder) -> list[Genesis]:
    """The newest, by stage."""
    if not folder.ledger.exists():
        return []
    ledger = Ledger(folder.ledger)
    try:
        found = [Genesis.from_value(event.facts) for event in ledger.events("genesis")]
    finally:
        ledger.close()
    return sorted((one for one in found if one.era == found[-1].era), key=lambda genesis: genesis.stage)


def _fetch_newer(archive: RemoteArchive, folder: RunFolder, say: Callable[[str], None]) -> None:
    """The newest checkpoint at a URL, if the folder has lost it."""
    there, here = archive.versions(), latest_checkpoint(folder.checkpoints)
    if there and (here is None or here.version < there[-1]):
        say(f"fetching checkpoint {there[-1]} from {archive.url} ...")
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        archive.fetch(there[-1], folder.checkpoints)


def check_stage_sizes(settings: RunSettings) -> None:
    """Raises SettingsError if a round's result of a stage that is full would not fit into a message."""
    wanted = settings.limits.max_peers_per_stage
    for stage, parts in enumerate(stage_num_parts(settings)):
        most = most_members(parts, settings.microbatches_of_one, each=settings.has_windows, max_bytes=MAX_META_BYTES)
        if wanted > most:
            raise SettingsError(
                f"limits.max_peers_per_stage = {wanted}: a round's result of stage {stage} with {parts} parts fits into"
                f" a message of {MAX_META_BYTES >> 20} MiB for {most} peers at most; lower it, or cut the model into"
                " more stages"
            )


def check_rates(settings: RunSettings) -> None:
    """Raises SettingsError for a rate that no tensor has."""
    layouts = (stage_layout(settings.model, stage) for stage in range(settings.model.num_stages))
    names = [name for layout in layouts for name in layout.names]
    for group in settings.optimizer.rates:
        if not any(map(group.fits, names)):
            words = sorted({word for name in names for word in name.split(".") if not word.isdigit()})
            raise SettingsError(
                f'optimizer.rates: no tensor has "{group.tensors}" in its name; it may be one of {", ".join(words)}'
            )


def _known_settings(folder: RunFolder) -> RunSettings | None:
    """The settings of the run in this folder; None if there is none."""
    if not folder.settings.exists():
        return None
    return settings_from_value(unpack(folder.settings.read_bytes(), max_bytes=MAX_SETTINGS_BYTES))


def _write_settings(folder: RunFolder, settings: RunSettings) -> None:
    with whole_file(folder.settings) as partial:
        partial.write_bytes(settings_bytes(settings))


def _initial_states(
    folder: RunFolder, settings: RunSettings, manifest: Manifest, say: Callable[[str], None]
) -> list[StageState]:
    """One stage's are made at a time, and lie on disk then: a host's memory does not grow with the model."""
    states = []
    folder.first_weights.mkdir(exist_ok=True)
    source = manifest.initial_checkpoint
    weights = initial_weights(settings.model, settings.data.seed, source)
    for stage, flat in enumerate(weights):
        say(f"{'reading' if source else 'making'} the weights of stage {stage} ...")
        layout = stage_layout(settings.model, stage)
        states.append(first_state(settings, layout, _on_disk(folder.first_weights / f"stage-{stage}", flat)))
    return states


def _on_disk(path: Path, values: NDArray[np.float32]) -> NDArray[np.float32]:
    with whole_file(path) as partial, partial.open("wb") as file:
        file.write(np.ascontiguousarray(values, dtype=np.float32).data)
    return np.frombuffer(mapped(path), dtype=np.float32)


def _resume(
    folder: RunFolder, signed: SignedRun, manifest: Manifest, say: Callable[[str], None]
) -> tuple[list[StageState], LeaseTable]:
    """The latest checkpoint's states and data position; the initial ones if there is no checkpoint."""
    settings = signed.first
    info = latest_checkpoint(folder.checkpoints)
    if info is None:
        states = _initial_states(folder, settings, manifest, say)
        if tuple(state_digest(state) for state in states) != settings.initial_state_digests:
            raise SettingsError(
                f"--dir {folder.root}: this machine makes other initial weights than the run began with; "
                "start the run anew in another folder"
            )
        return states, LeaseTable()
    say(f"resuming from version {info.version}")
    return archived(info, signed.in_force), leases_of(info)


def taken_up_again(run: PreparedRun) -> PreparedRun:
    """The run as its folder has it by now: from its latest checkpoint, if there is one."""
    _clear(run.folder)
    signed = replace(run.signed, amendments=_amendments(run.folder))
    info = latest_checkpoint(run.folder.checkpoints)
    states, leases = run.states, run.leases
    if info is not None:
        states, leases = archived(info, signed.in_force), leases_of(info)
    return replace(run, signed=signed, settings=signed.in_force, states=states, leases=leases)


def archived(info: CheckpointInfo, settings: RunSettings) -> list[StageState]:
    """The states of a checkpoint, of the stages as the run has them now."""
    stages = range(info.meta.model.num_stages)
    states = [load_stage(info, stage, stage_layout(info.meta.model, stage)) for stage in stages]
    if info.meta.model.stage_layers != settings.model.stage_layers:
        states = recut(states, [stage_layout(settings.model, stage) for stage in range(settings.model.num_stages)])
    return [replace(state, name=UNNAMED) for state in states]


def leases_of(info: CheckpointInfo) -> LeaseTable:
    """Data position of a checkpoint."""
    return LeaseTable.from_value(json.loads(json.dumps(info.meta.data_position)))
