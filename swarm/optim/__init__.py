"""From a step's gradients to the next version of the weights, the same bits on every replica."""
