"""What is measured of peers' memory is held against what they said before they joined."""

import json
import os
from pathlib import Path

import psutil
import pytest

from benchmarks.owner import memory
from swarm.core.plan import stage_memory_bytes, total_bytes
from swarm.manifest.file import assumed_data, freeze, parse_manifest
from swarm.manifest.model import hidden_size, stage_num_parameters

GIB = 1 << 30
SAID = "2026 INFO peer.owner.room: at most 1.500 GiB of memory: libraries 0.40 GiB; p2pd 0.10 GiB; moments 1.00 GiB"


def test_every_row_is_a_run_whose_stages_hold_what_the_row_is_about(tmp_path: Path) -> None:
    options = memory.options_of([])
    assert options.row == list(memory.ROWS)
    reckoned, counts, in_flight = dict[str, dict[str, int]](), dict[str, int](), dict[str, int]()
    for name, row in memory.ROWS.items():
        manifest = parse_manifest(memory.manifest_of(options, row), tmp_path / "run.toml")
        settings = freeze(manifest, assumed_data(manifest), ())
        counts[name] = stage_num_parameters(settings.model)[-1]
        reckoned[name] = stage_memory_bytes(
            settings, counts[name], hidden_size(settings.model), "cpu", stage=memory.STAGES - 1
        )
        first = stage_memory_bytes(settings, counts[name], hidden_size(settings.model), "cpu", stage=0)
        in_flight[name] = first["host.activations in flight"]
    a_parameter = {name: total_bytes(items, "host") / counts[name] for name, items in reckoned.items()}
    assert a_parameter["int8 moments"] == pytest.approx(a_parameter["full"] - 6, abs=0.1)
    assert a_parameter["public"] > a_parameter["full"] + 7.9
    assert in_flight["recompute"] < in_flight["full"] / 3
    logits = "host.logits and their gradient"
    assert reckoned["vocabulary of 128 k"][logits] > 100 * reckoned["full"][logits]


def test_what_a_peer_said_is_read_and_what_it_held_is_a_share_of_it(tmp_path: Path) -> None:
    (tmp_path / "daemon.log").write_text(SAID)
    peer = memory.Watched(tmp_path, 1, psutil.Process(os.getpid()))
    peer.look()
    assert 0 < peer.own_bytes < psutil.Process().memory_info().rss
    assert peer.mapped_bytes > 0
    peer.all_bytes = GIB
    found = memory.figures("full", peer, GIB // 4)
    assert found["reckoned_bytes"] == 1.5 * GIB
    assert found["held_share"] == pytest.approx(2 / 3)
    assert found["stage_reckoned_bytes_a_parameter"] == pytest.approx(4.0, abs=1e-6)
    assert found["stage_held_bytes_a_parameter"] == pytest.approx(2.0, abs=1e-6)
    assert "1.50 GiB reckoned, 1.00 held at most (0.667)" in memory.line_of(found)
    json.dumps(found)


def test_a_small_form_is_one_row(tmp_path: Path) -> None:
    options = memory.options_of(["--smoke"])
    assert (options.row, options.steps) == (["full"], 2)
