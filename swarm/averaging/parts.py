"""This is where a stage's flattened parameters are cut into parts, the unit of commitment and reduction."""

from swarm.core.settings import PART_VALUES


def num_parts(num_values: int) -> int:
    """Parts of a vector; the last may be shorter."""
    return -(-num_values // PART_VALUES)


def part_slice(index: int, num_values: int) -> slice:
    """Where part `index` lies in the vector. Raises IndexError for a part it does not have."""
    if not 0 <= index < num_parts(num_values):
        raise IndexError(f"part {index} of {num_parts(num_values)}")
    return slice(index * PART_VALUES, min((index + 1) * PART_VALUES, num_values))
