"""How many of a stage's reduced parts others recompute.

A lie in a reduced part costs the stage the part's share of a step. So the fewer parts there are, the more of them are
recomputed: what a wrong reducer does before it is found is bounded in whole steps.
"""

FEWEST_PARTS = 80
"""At the default budget four parts of a version are recomputed in a stage of so many, and in each that has fewer. Who
reduces wrongly has then spoiled a quarter of a step on average when the first of its lies is drawn, or one part where
that is more."""


def audits_of_a_part(reducer_share: float, num_parts: int) -> float:
    """On average, in a version of a stage of so many."""
    return reducer_share * max(1.0, FEWEST_PARTS / num_parts)
