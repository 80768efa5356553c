"""The hot loops on vectors of fp32: the same bits on every machine, each said once more in `kernels.reference`."""
