"""The strengths of attacks: fixed before any defence was tuned, and not changed since.

Where the literature or an earlier measurement here (`benchmarks/verification/attacks.py`) gives a value, it is that
one.
"""

FLIP_FACTORS = {"sign_flip": 1.0, "sign_flip_1000": 1000.0}
"""The own mean gradient times minus this."""
ALIE_DEVIATIONS = 1.5
"""A Little Is Enough (Baruch, Baruch, Goldberg, 2019): the mean less so many standard deviations, in every value."""
ALIE_MICROBATCHES = 16
"""About so many of the last microbatch gradients tell the deviation."""
INNER_PRODUCT_SHARE = 0.5
"""Inner-product manipulation (Xie, Koyejo, Gupta, "Fall of Empires", 2019): minus this times the mean."""
PARTIAL_WORK_SHARE = 0.5
"""Share of the claimed microbatches whose gradients are not in the contribution."""
ROW_BIAS_SHARE = 2e-6
"""A bias where the own mean gradient is zero: each value over the root mean square of all. A chunk of nothing else is
then 2e-3 of what counts as a quiet chunk's norm: a twentieth of what an int8 wire calls fraud."""
SLOW_BIAS_SHARE = 8e-4
"""A bias that is always the same, where the mean is not zero: each value over the root mean square of those. Below what
any wire calls fraud in one audit (1e-3 and more)."""
DROPPED_SAMPLES_SHARE = 0.5
"""Share of a microbatch's samples that get no gradient."""
STALE_VERSIONS = 4
"""How many versions older the weights are than is stated."""
NOISE_SHARE = 0.5
"""Gaussian noise: its norm over the tensor's."""
IN_TOLERANCE_SHARE = 8e-4
"""Noise that stays below what fp32 over int8 accepts (1e-3): its norm over the tensor's."""
SOMETIMES_SHARE = 0.1
"""Partial cheating: share of microbatches, or of steps."""
BIT_FLIP_SHARE = 0.1
"""Share of microbatches in which one bit flips, of a weight or of a gradient, by turns of chance."""
FLIPPED_BITS = (*range(30), 31)
"""Bits of an fp32 value that may flip. Not the exponent's highest: what it makes is not finite, and the peer's own
codecs leave it out before anybody else sees it."""
LAZY_SHARES = {
    "lazy_window_10": 0.1,
    "lazy_window_20": 0.2,
    "lazy_window_30": 0.3,
    "lazy_window_50": 0.5,
    "lazy_window_90": 0.9,
}
"""Share of a window's microbatches that are claimed and never computed: the gradient before counts once more."""
BENT_VALUES = {"bent_layer": 1 << 14, "bent_row": 1 << 8}
"""Of how many values that lie beside each other the way of a window is bent."""
BENT_SHARE = 1.0
"""By how much, over their length, in a direction that never changes."""
SMALL_MOMENTS_SHARE = 0.01
"""Second moments are said to be so much of what they are."""
LONG_FACTOR = 1000.0
"""A fault that makes the own mean gradient so many times as long."""
REDUCED_FACTOR = -1.0
"""A wrong reducer sends the aggregate times this."""
REPLAYED_RECORDS = 64
"""Records of others that are kept to be stored again."""
INFLATED_VERSIONS = 1 << 20
"""How far ahead of its stage a boastful peer says it is."""
SYBILS = 32
"""Identities that one flooder makes up."""
WRITTEN_SQUARES = 1e30
"""What a lying leader says that the squares of each part's values sum to."""
GROUND_NAMES = 256
"""Hashes that a grinding peer tries for each contribution: enough to be first of any stage's members, if it counted."""
GROUND_VALUE_EVERY = 8
"""In one step of so many it also reveals what its chain does not have, and is left out."""
