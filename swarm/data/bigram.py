"""The simplest language model: what the next token is, knowing one token before it.

Bigram counts interpolated with unigrams by Witten and Bell's rule (IEEE Transactions on Information Theory 37, 1991):
a context is trusted by how often it was seen against how many different tokens followed it. A model that is
trained well must beat its held-out loss.
"""

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]


def bigram_loss(train: Tokens, held_out: Tokens, *, vocab_size: int) -> float:
    """Mean loss in nats of each held-out token after the first, given the one before it.

    Both arrays are one-dimensional ids below `vocab_size`, at least two tokens long.
    """
    if min(len(train), len(held_out)) < 2:
        raise ValueError(f"a bigram needs two tokens; training has {len(train)}, held-out {len(held_out)}")
    unigram_counts = np.bincount(train, minlength=vocab_size)
    unigram = (unigram_counts + 1) / (len(train) + vocab_size)  # add one: no token is impossible

    pairs, pair_counts = np.unique(_pairs(train, vocab_size), return_counts=True)
    context_counts = np.bincount(train[:-1], minlength=vocab_size)
    context_kinds = np.bincount(pairs // vocab_size, minlength=vocab_size)  # different tokens seen after each

    queries = _pairs(held_out, vocab_size)
    found = np.minimum(np.searchsorted(pairs, queries), len(pairs) - 1)
    counts = np.where(pairs[found] == queries, pair_counts[found], 0)
    context, following = held_out[:-1], held_out[1:]
    seen, kinds = context_counts[context], context_kinds[context]
    # An unseen context falls back to the unigram: kinds and seen are both zero there.
    share = np.where(seen + kinds > 0, kinds / np.maximum(seen + kinds, 1), 1.0)
    probability = counts / np.maximum(seen + kinds, 1) + share * unigram[following]
    return float(-np.log(probability).mean())


def _pairs(tokens: Tokens, vocab_size: int) -> npt.NDArray[np.int64]:
    ids = tokens.astype(np.int64)
    return ids[:-1] * vocab_size + ids[1:]
