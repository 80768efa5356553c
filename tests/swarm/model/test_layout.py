"""The flat order of parameters is fixed."""

import numpy as np
import pytest
import torch

from swarm.model.layout import ParameterLayout
from swarm.model.stage import StageModel
from tests.swarm.model.tiny_models import tiny_model

LAYOUT = ParameterLayout.of({"c": (2, 3), "b": (4,), "a": (1, 2), "d": (3, 1)})


def test_tensors_lie_in_name_order_without_gaps() -> None:
    assert LAYOUT.names == ("a", "b", "c", "d")
    assert LAYOUT.offsets == (0, 2, 6, 12)
    assert LAYOUT.num_values == 15


def test_views_share_memory_for_numpy_and_torch() -> None:
    flat = np.arange(15, dtype=np.float32)
    views = LAYOUT.views(flat)
    assert views["c"].tolist() == [[6, 7, 8], [9, 10, 11]]
    views["b"][:] = -1
    assert flat[2:6].tolist() == [-1] * 4
    tensor = torch.zeros(15)
    LAYOUT.views(tensor)["d"].add_(1)
    assert tensor[12:].tolist() == [1, 1, 1]


def test_views_are_refused_for_a_vector_of_another_length() -> None:
    for shape in ((14,), (16,), (15, 1)):
        with pytest.raises(ValueError, match="15 values"):
            LAYOUT.views(np.zeros(shape, np.float32))


def test_decay_leaves_out_vectors_and_merges_neighbours() -> None:
    assert LAYOUT.decay_ranges == ((0, 2), (6, 15))
    assert ParameterLayout.of({}).decay_ranges == ()


def test_stages_hold_every_parameter_once_under_its_name_in_the_model() -> None:
    whole = StageModel(tiny_model("qwen3", 1), 0).layout
    stages = [StageModel(tiny_model("qwen3", 3), stage).layout for stage in range(3)]
    assert sorted(name for layout in stages for name in layout.names) == sorted(whole.names)
    assert "model.embed_tokens.weight" in stages[0].names
    assert {name.split(".")[2] for name in stages[1].names} == {"1", "2"}
    assert {"model.norm.weight", "lm_head.weight"} <= set(stages[2].names)
