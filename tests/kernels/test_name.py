"""Another package of this name, Hugging Face's, is one that transformers uses where it finds it."""

from transformers.utils.import_utils import is_kernels_available


def test_transformers_does_not_take_these_kernels_for_hugging_faces() -> None:
    """It goes by the version of whatever distribution has a package of this name: homeswarm 0.18.2 would do."""
    assert not is_kernels_available()
