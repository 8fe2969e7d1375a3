"""The benchmark of a training step's time."""
