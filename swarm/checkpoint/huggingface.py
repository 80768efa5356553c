"""A checkpoint as a folder that transformers, or of adapters peft, loads without us, and its trial."""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.checkpoint.adapters import CONFIG as ADAPTERS
from swarm.checkpoint.adapters import HOW_TO_LOAD, WeightsByPart, merged_weights, write_adapters
from swarm.checkpoint.archive import CheckpointInfo, load_weights, read_checkpoint
from swarm.checkpoint.model_card import model_card
from swarm.checkpoint.parent import GENERATION, PARENT
from swarm.checkpoint.record import TOKENIZER
from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings
from swarm.model.adapters.base import whole_model
from swarm.model.families import Family, family_of, is_tied, whole_config
from swarm.model.layout import ParameterLayout
from swarm.model.stack import stage_layout
from swarm.model.stored import DTYPES, INDEX_FILE, pieces_of
from swarm.model.subspace import multiplied_out

MAX_SHARD_BYTES = 2 << 30
"""Weights above this are written in several files with an index."""

_TOKENIZER_FILES = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(merges|vocab)\.txt|[^.].*\.model|chat_template\.jinja"
)
"""Data alone: a tokenizer may bring a program too, which whoever loads it may have said yes to."""
_TOKENIZER_CONFIG, _NAMES_CODE = "tokenizer_config.json", "auto_map"
UNTIED = "its embeddings were tied; in this run's stages the head trained on its own, and is exported so"


def export_huggingface(
    checkpoint_dir: Path,
    out_dir: Path,
    *,
    tokenizer_dir: Path | None = None,
    base: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint as a Hugging Face model folder: config, safetensors, generation config, tokenizer.

    Of adapters it is a folder for peft, or with `base` the model that they make together with it: the Hugging Face
    folder that the run began from, or the host's file of it.

    The tokenizer is that of `tokenizer_dir`, by default the one that the checkpoint holds, or bytes. Weights are in the
    type that the config names; tied embeddings stay tied where one stage had both, else config and card say that they
    are not. The generation config is that of the checkpoint that the run began from; the card is a README.md.
    Raises SettingsError if `out_dir` is not empty, the checkpoint is damaged, the tokenizer is missing, or `base` is
    another.
    """
    info = read_checkpoint(checkpoint_dir)
    out_dir = out_dir.absolute()
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise SettingsError(f"{out_dir} is not an empty folder; give a new one, so that nothing is overwritten")
    if tokenizer_dir is None and (info.path / TOKENIZER).is_dir():
        tokenizer_dir = info.path / TOKENIZER
    if tokenizer_dir is None and info.meta.tokenizer != "bytes":
        raise SettingsError(
            f"the run's tokenizer is {info.meta.tokenizer!r}, and the checkpoint holds none; give its folder"
        )
    made = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        if info.meta.model.has_base and base is None:
            write_adapters(info, made)
            (made / "README.md").write_text(model_card(info, [HOW_TO_LOAD]))
        else:
            model, weights = _weights_of(info, base)
            _write_weights(model, weights, made, max_shard_bytes)
            _write_configs(info, model, made)
        if tokenizer_dir is None:
            _write_byte_tokenizer(made)
        else:
            copy_tokenizer(tokenizer_dir, made)
        if out_dir.exists():
            out_dir.rmdir()
        os.rename(made, out_dir)
    except OSError as error:
        raise SettingsError(f"export to {out_dir} failed: {error}; check the path and the free space") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def generate(
    model_dir: Path, prompt: str, *, max_new_tokens: int, temperature: float, seed: int, chat: bool = False
) -> Iterator[str]:
    """The text a model folder continues `prompt` with, piece by piece; at temperature 0 the likeliest token each time.

    With `chat` the answer to `prompt`, which the folder's chat template makes a conversation of. Uses nothing but
    transformers. Raises SettingsError when the folder is no Hugging Face model, or has no such template.
    """
    import torch

    if temperature < 0:
        raise SettingsError(f"temperature = {temperature}: give 0 or more")
    model, tokenizer = _load(model_dir)
    ids = _asked(model_dir, tokenizer, prompt) if chat else tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise SettingsError("the prompt is empty; give the model at least one token to continue")
    end_ids = model.generation_config.eos_token_id
    stop_at = set(end_ids if isinstance(end_ids, list) else [end_ids])
    chance = torch.Generator().manual_seed(seed)
    written: list[int] = []
    shown = ""
    cache = None
    for _ in range(max_new_tokens):
        with torch.no_grad():
            output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits_V = output.logits[0, -1].float()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=chance))
        if token in stop_at:
            break
        written.append(token)
        ids = torch.tensor([[token]])
        text = tokenizer.decode(written)
        # A character of several tokens is shown once it is whole.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(written)[len(shown) :]
    if rest:
        yield rest


def _asked(model_dir: Path, tokenizer: Any, prompt: str) -> Any:
    """A question's tokens, and those that begin its answer."""
    if not tokenizer.chat_template:
        raise SettingsError(f"{model_dir} has no chat template; leave --chat out, or give the folder one")
    said = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded["input_ids"]


def _load(model_dir: Path) -> tuple[Any, Any]:
    from swarm.local.transformers_library import transformers

    if (model_dir / ADAPTERS).is_file():
        raise SettingsError(
            f"{model_dir} holds adapters, no model; `swarm pull` or `swarm export` with --base MODEL makes one of both"
        )
    if not (model_dir / "config.json").is_file():
        raise SettingsError(f"{model_dir} is no Hugging Face model folder; write one with `swarm export`")
    transformers.utils.logging.disable_progress_bar()
    try:
        given: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, **given)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(model_dir, **given)
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{model_dir} cannot be loaded by transformers: {error}") from error


def _weights_of(info: CheckpointInfo, base: Path | None) -> tuple[ModelSettings, WeightsByPart]:
    """The model that is exported, and its weights."""
    model = info.meta.model
    if base is not None:
        return whole_model(model), merged_weights(info, base)
    return exported_weights(model, partial(load_weights, info))


def exported_weights(
    model: ModelSettings, read: Callable[[int, ParameterLayout], NDArray[np.float32]]
) -> tuple[ModelSettings, WeightsByPart]:
    """The ordinary model of its family, and its weights; `read` gives a stage's trained ones."""
    layouts = [stage_layout(model, stage) for stage in range(model.num_stages)]
    if model.subspace == 1:
        return model, [(layout, partial(read, stage, layout)) for stage, layout in enumerate(layouts)]
    whole = replace(model, subspace=1, subspace_seed=0)

    def made(stage: int, of_whole: ParameterLayout) -> NDArray[np.float32]:
        return multiplied_out(model, layouts[stage].views(read(stage, layouts[stage])), of_whole)

    of_whole = [stage_layout(whole, stage) for stage in range(model.num_stages)]
    return whole, [(layout, partial(made, stage, layout)) for stage, layout in enumerate(of_whole)]


def _write_weights(model: ModelSettings, weights: WeightsByPart, out: Path, max_shard_bytes: int) -> None:
    import torch
    from safetensors.torch import save_file

    family, dtype = family_of(model.config_json), getattr(torch, _dtype(model))
    layouts = [layout for layout, _ in weights]
    shards = _shards(family, layouts, dtype.itemsize, max_shard_bytes)
    single = len(shards) == 1
    files = [
        "model.safetensors" if single else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        for index in range(len(shards))
    ]
    pending: dict[str, torch.Tensor] = {}
    index = 0
    for layout, read in weights:
        for name, tensor in layout.views(read()).items():
            for piece in pieces_of(family, name, tensor.shape):
                part = torch.from_numpy(np.require(tensor[piece.where], requirements=("C", "W"))).to(dtype)
                if not bool(part.isfinite().all()):
                    raise SettingsError(f"{piece.name} has values that {_dtype(model)} cannot hold: nothing is written")
                pending[piece.name] = part
                if len(pending) == len(shards[index]):
                    save_file(pending, out / files[index], metadata={"format": "pt"})
                    pending = {}
                    index += 1
    assert index == len(shards)
    assert not pending
    if not single:
        total = sum(dtype.itemsize * layout.num_values for layout in layouts)
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX_FILE).write_text(json.dumps(index_json, indent=1) + "\n")


def _shards(family: Family, layouts: list[ParameterLayout], value_bytes: int, max_shard_bytes: int) -> list[list[str]]:
    """Tensor names of each file, stage after stage, a file holding as many as fit."""
    shards: list[list[str]] = [[]]
    used_bytes = 0
    for layout in layouts:
        for name, shape, size in zip(layout.names, layout.shapes, layout.sizes, strict=True):
            pieces = pieces_of(family, name, shape)
            for piece in pieces:
                piece_bytes = value_bytes * size // len(pieces)
                if shards[-1] and used_bytes + piece_bytes > max_shard_bytes:
                    shards.append([])
                    used_bytes = 0
                shards[-1].append(piece.name)
                used_bytes += piece_bytes
    return shards


def _dtype(model: ModelSettings) -> str:
    """The type of the config, by PyTorch's name."""
    named = str(whole_config(model.config_json).dtype).removeprefix("torch.")
    return named if named in DTYPES.values() else "float32"


def _write_configs(info: CheckpointInfo, model: ModelSettings, out: Path) -> None:
    from swarm.local.transformers_library import transformers

    whole = whole_config(model.config_json)
    config = type(whole).from_dict(whole.to_dict())
    notes = []
    if config.tie_word_embeddings and not is_tied(model, 0):
        config.tie_word_embeddings = False
        config.homeswarm_note = UNTIED
        notes.append(UNTIED)
    config.architectures = [family_of(model.config_json).causal_class]
    config.dtype = _dtype(model)
    config.save_pretrained(out)
    came_with = info.path / PARENT / GENERATION
    if came_with.is_file():
        said, known = _without(came_with, ()), transformers.GenerationConfig().to_dict()
        kept = {name: value for name, value in said.items() if name in known}
        (out / GENERATION).write_text(json.dumps(kept, indent=1) + "\n")
    else:
        transformers.GenerationConfig.from_model_config(config).save_pretrained(out)
    (out / "README.md").write_text(model_card(info, notes))


def _write_byte_tokenizer(out: Path) -> None:
    """A tokenizer of the `tokenizers` library whose ids are the bytes of the UTF-8 text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from swarm.local.transformers_library import transformers

    letters = _letter_of_byte()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    ).save_pretrained(out)


def _letter_of_byte() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def copy_tokenizer(tokenizer_dir: Path, out: Path) -> None:
    """The files of a tokenizer's folder, or the one file that it is. Raises SettingsError if there are none."""
    if tokenizer_dir.is_file():
        shutil.copyfile(tokenizer_dir, out / "tokenizer.json")
        return
    found = [path for path in sorted(tokenizer_dir.glob("*")) if _TOKENIZER_FILES.fullmatch(path.name)]
    if not any(path.is_file() for path in found):
        raise SettingsError(f"{tokenizer_dir} holds no tokenizer; give the folder with tokenizer.json")
    for path in found:
        if path.name == _TOKENIZER_CONFIG:
            (out / path.name).write_text(json.dumps(_without(path, {_NAMES_CODE}), indent=1) + "\n")
        elif path.is_file():
            shutil.copyfile(path, out / path.name)


def _without(path: Path, names: Collection[str]) -> dict[str, Any]:
    """What a file of JSON says, but for these names. Raises SettingsError."""
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise SettingsError(f"{path} is a JSON {type(said).__name__}, not an object")
    return {name: value for name, value in said.items() if name not in names}
