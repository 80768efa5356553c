"""A replica's own memory: what it has of a step, and the versions between two of them."""

from kernels.threads import ONE_THREAD
from peer.state.replica import StageReplica
from swarm.core.ids import Step
from swarm.memory.kept_buffers import BUFFERS
from swarm.model.initial import initial_weights
from swarm.model.stage import StageModel
from swarm.model.tensor_pass import TensorPass
from swarm.optim.stage_step import first_state, stage_clip_norm
from tests.peer.stage.stage_in_memory import settings_of, step


def test_sums_and_versions_take_turns_in_the_memory_of_two_of_them() -> None:
    settings = settings_of("friends", "fp32")
    model = StageModel(settings.model, 0)
    state = first_state(settings, model.layout, next(initial_weights(settings.model, 0, None)))
    replica = StageReplica(settings, model, state, clip_norm=stage_clip_norm(settings, 0), threads=ONE_THREAD)
    del state
    tensors, places = TensorPass(settings, model), set()
    for _ in range(4):
        places.add(replica.sum_of(Step(replica.version)).gradient.flat.data_ptr())
        assert not BUFFERS.kept_bytes, "a round's messages are kept while microbatches are computed"
        step(replica, tensors)
        places.add(replica.state.weights.ctypes.data)
    assert len(places) == 2
