"""Ranks in one process, as the product has them."""

from ensemble_ml.distributed.simulated import Room, SimulatedCommunicator, on_ranks

__all__ = ["Room", "SimulatedCommunicator", "on_ranks"]
