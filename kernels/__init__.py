"""The hot loops on vectors of fp32: the same bits on every machine, each plainly said in `tests.kernels.reference`."""
