"""Topology, communication, halo exchange, partition and vote: the only room that may use torch.distributed.

`start` meets the other ranks and gives a `Session` with the `Mesh` of communicators; one rank runs the same code.
"""

from ensemble_ml.distributed.communicator import Communicator, NullCommunicator, Pending, TorchCommunicator
from ensemble_ml.distributed.launch import Session, solo, start
from ensemble_ml.distributed.mesh import Mesh, make_mesh
from ensemble_ml.distributed.topology import Topology, make_topology

__all__ = [
    "Communicator",
    "Mesh",
    "NullCommunicator",
    "Pending",
    "Session",
    "Topology",
    "TorchCommunicator",
    "make_mesh",
    "make_topology",
    "solo",
    "start",
]
