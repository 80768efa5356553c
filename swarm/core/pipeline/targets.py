"""What stands among a microbatch's targets besides token ids."""

IGNORED_TARGET = -100
"""A target that is not counted."""
DOCUMENT_BEGINS = -101
"""One that is not counted, as another document begins with it."""
MAX_BOUNDS = 4096
"""Documents that begin inside the samples of a microbatch."""
FEWEST_DOCUMENTS, TOKENS_A_DOCUMENT = 64, 32
"""A sample holds at most so many documents, or one for so many of its tokens if these are more."""


def most_documents(sequence_length: int) -> int:
    """Of a sample."""
    return max(FEWEST_DOCUMENTS, sequence_length // TOKENS_A_DOCUMENT)
