"""One bank of weights for all kernels against networks with kernels of their own (`benchmark=bank`)."""
