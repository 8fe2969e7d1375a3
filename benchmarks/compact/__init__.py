"""Compaction against flat widths, separable kernels, the same widths from scratch, and no network at all."""
