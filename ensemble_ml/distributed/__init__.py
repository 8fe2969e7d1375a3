"""Topology, halo exchange, partition and vote: the only room that may use torch.distributed. Empty so far."""
