"""The token files of a run that is known already: those on disk, by what its settings say of them.

They are what the run is about: other text makes other tokens, and nothing is written over those that are here.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from swarm.core.errors import SettingsError
from swarm.core.settings import DataSettings
from swarm.data.pieces import list_pieces
from swarm.data.prepare import MixedSource, PreparedData, is_as_written, marks_of, prepare_data
from swarm.data.token_file import pieces_path, token_bytes_for
from swarm.data.tokenizer import load_tokenizer
from swarm.disk.whole_file import whole_file
from swarm.manifest.tables import DataTable


def known_data(data: DataTable, settings: DataSettings, out_dir: Path) -> PreparedData:
    """What a run's `settings` say of the files in `out_dir`, with the tokenizer and the weights that `data` names now.

    No text is read, nor are the files. Raises SettingsError if there is no such tokenizer.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    return PreparedData(
        train_path=out_dir / "train.tokens",
        held_out_path=out_dir / "held_out.tokens",
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        token_bytes=token_bytes_for(tokenizer.vocab_size << marks_of(data).bits),
        end_of_document=tokenizer.end_of_document,
        num_train_tokens=settings.num_train_tokens,
        num_train_targets=settings.num_train_targets or settings.num_train_tokens,
        num_held_out_tokens=settings.num_held_out_tokens,
        train_digest=settings.train_digest,
        held_out_digest=settings.held_out_digest,
        mixture=tuple(
            MixedSource(first_token=first_token, num_tokens=num_tokens, weight=source.weight)
            for (first_token, num_tokens, _), source in zip(settings.mixture, data.mixture, strict=False)
        ),
        skipped=(),
    )


def take_known_tokens(data: DataTable, known: PreparedData, say: Callable[[str], None]) -> None:
    """See that the files are those that `known` names. If one is missing or changed they are made anew of the text,
    beside, and moved in if they are the same.

    Raises SettingsError where the text gives others, or is not there: then all that was here still is.
    """
    named = {known.train_path: known.train_digest, known.held_out_path: known.held_out_digest}
    missing = [path for path, digest in named.items() if not _is_here(path, digest)]
    if not missing:
        say("the run in this folder is taken up with the tokens that it has: its text is not read again")
        return
    lost, folder = " and ".join(map(str, missing)), known.train_path.parent
    say(f"{lost}: missing or changed since the run was made; reading the text again ...")
    beside = folder.with_name(f"{folder.name}.again")
    again = prepare_data(data, beside, say)
    for path, found in ((known.train_path, again.train_digest), (known.held_out_path, again.held_out_digest)):
        if found != named[path]:
            shutil.rmtree(beside)
            raise SettingsError(
                f"{lost}: missing or changed since the run was made, and the text now gives another {path.name}: "
                f"digest {found.hex()[:16]}, the run's is {named[path].hex()[:16]}; put the file back from a copy, "
                "or make data.text, data.tokenizer and their options what they were, or choose another --dir for a new "
                "run"
            )
    for path in sorted(beside.iterdir()):
        os.replace(path, folder / path.name)
    beside.rmdir()


def _is_here(path: Path, digest: bytes) -> bool:
    """Whether this is the file of that digest; the list of its pieces then lies beside it."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    if is_as_written(path, digest):
        return True
    pieces = list_pieces(path)
    if pieces.digest != digest:
        return False
    with whole_file(pieces_path(path)) as partial:
        partial.write_bytes(pieces.hashes)
    return True
