"""Everything that happens between ranks: topology, communication, halo exchange, partition and votes.

Only this package may use `torch.distributed`. `start` returns a `Session`. Entering the session joins the other ranks
of the job and makes the `Mesh` of communicators. A single rank runs the same code with communicators that send nothing.
"""

from ensemble_ml.distributed.communicator import Communicator, NullCommunicator, TorchCommunicator
from ensemble_ml.distributed.launch import Session, solo, start
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.distributed.topology import Topology
