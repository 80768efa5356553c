"""What a host refuses before it makes a run of a manifest."""

from pathlib import Path

import pytest

from swarm.core.errors import SettingsError
from tests.swarm_in_process import manifest_of, prepare


def test_a_rate_that_no_tensor_has_is_refused_with_the_words_that_there_are(tmp_path: Path) -> None:
    rates = [{"tensors": word, "times": 0.5} for word in ("lm_head", "head")]
    with pytest.raises(SettingsError, match=r'optimizer.rates: no tensor has "head" in its name; .*, lm_head, '):
        prepare(manifest_of(optimizer={"rates": rates}), tmp_path)
