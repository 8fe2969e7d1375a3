"""One rank of the benchmark of compressed Lion: `python -m benchmarks.lion.worker JOB FOLDER`.

JOB is a JSON object with `work` and its settings. Rank 0 writes the result to FOLDER/results.json.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.jobs import take_part
from benchmarks.step.benchmark import benchmark_spec, random_batch
from ensemble_ml.config import ExchangeName, MomentumSync, OptimConfig, Precision
from ensemble_ml.distributed import Communicator, Session
from ensemble_ml.distributed.choice import make_exchange, own_state, restore_state
from ensemble_ml.distributed.exchange import Reduction
from ensemble_ml.distributed.pack import pack_signs, unpack_signs
from ensemble_ml.distributed.vote import Rounds, majority, room, sign_allreduce
from ensemble_ml.distributions import crps
from ensemble_ml.fields import Family
from ensemble_ml.models import Climate, EnsembleModel, Speed
from ensemble_ml.optim import Lion

# The entrants: the name in the table, and the settings of optim.
ENTRANTS: dict[str, dict[str, Any]] = {
    "vote, 1 bit": {"exchange": ExchangeName.vote, "bits": 1},
    "vote, 2 bits": {"exchange": ExchangeName.vote, "bits": 2},
    "vote, 4 bits": {"exchange": ExchangeName.vote, "bits": 4},
    "vote, 8 bits": {"exchange": ExchangeName.vote, "bits": 8},
    "fp32 all-reduce in our buckets": {"exchange": ExchangeName.allreduce},
    "fp16 all-reduce in our buckets": {"exchange": ExchangeName.fp16},
    "PowerSGD, rank 4": {"exchange": ExchangeName.powersgd, "rank": 4},
    "PowerSGD, rank 1": {"exchange": ExchangeName.powersgd, "rank": 1},
    "Distributed Lion": {"exchange": ExchangeName.distributed_lion},
    "Lion Cub, 8 bits": {"exchange": ExchangeName.lion_cub, "bits": 8},
    "Lion Cub, 1 bit": {"exchange": ExchangeName.lion_cub, "bits": 1},
}
DDP = "fp32 DDP"
BALLOTS = "vote, 1 bit, of packed ballots"


def communication(session: Session, job: dict[str, Any]) -> dict[str, list[float]]:
    """Time each exchange of `elements` numbers without training, and the parts from which its time is predicted.

    They take turns, so that other load on the machine affects all alike.

    Args:
        session: the ranks.
        job: `elements` and `repeats`.

    Returns:
        Seconds by name.
    """
    group, elements = session.mesh.world, job["elements"]
    u = torch.randn(elements, generator=torch.Generator().manual_seed(session.topology.rank))
    flat, half = u.clone(), u.half()
    out = torch.empty(room(elements, group.size))
    forms: dict[str, Callable[[int], object]] = {"fp32 all-reduce": lambda _: group.all_reduce(flat)}
    forms["fp16 all-reduce"] = lambda _: group.all_reduce(half)
    for bits in (1, 2, 4, 8):
        forms[f"vote, {bits} bit{'s' * (bits > 1)}"] = lambda step, bits=bits: sign_allreduce(  # type: ignore[misc]
            u, bits, group, step, out=out
        )
    packed = pack_signs(out, 0)
    forms[BALLOTS] = lambda step: _exchange_ballots(packed.view(group.size, -1), group, step)
    forms["packing"] = lambda step: unpack_signs(majority(list(pack_signs(out, step)[None]), step), out)
    for name, length in (("small", 8), ("large", len(packed))):
        sizes = [max(1, length // group.size)] * group.size
        sent, came = packed[: sum(sizes)].clone(), packed[: sum(sizes)].clone()
        forms[f"all-to-all, {name}"] = lambda _, s=sent, c=came, n=sizes: group.all_to_all_single(c, s, n, n)  # type: ignore[misc]
    found: dict[str, list[float]] = {name: [] for name in forms}
    for step in range(job["repeats"] + 1):
        for name, form in forms.items():
            flat.fill_(1.0)
            half.fill_(1.0)
            group.barrier()
            began = time.perf_counter()
            form(step)
            group.barrier()
            found[name].append(time.perf_counter() - began)
    return {name: times[1:] for name, times in found.items()}


def _exchange_ballots(ballots: Tensor, group: Communicator, step: int) -> None:
    rounds = Rounds([group], 1, step)
    rounds.cast(ballots, 0, lambda *_: None)
    rounds.finish()


def steps(session: Session, job: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Measure seconds and bytes (by the kernel's counters) of training steps of a 3D U-Net with each exchange.

    Entrants take turns, one step each, so that other load on the machine affects all alike.

    Args:
        session: the ranks.
        job: `entrants`, `repeats`, and shape and settings of the network.
    """
    world = session.mesh.world
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "bytes": []} for name in job["entrants"]}
    with ExitStack() as stack:
        entrants = {name: _entrant(session, job, name, stack) for name in job["entrants"]}
        for repeat in range(job["repeats"] + 2):  # DDP makes its buckets anew after the first step
            for name, step in entrants.items():
                world.barrier()
                before, began = interface_bytes(), time.perf_counter()
                step()
                world.barrier()
                if repeat > 1:
                    found[name]["seconds"].append(time.perf_counter() - began)
                    found[name]["bytes"].append(interface_bytes() - before)
    return found


def _entrant(session: Session, job: dict[str, Any], name: str, stack: ExitStack) -> Callable[[], None]:
    """Return a function that runs one training step with an exchange."""
    model, loss = _network(job)
    if name == DDP:
        return _ddp(model, loss)
    exchange = make_exchange(OptimConfig(lr=1e-5, **ENTRANTS[name]), session.topology, reduction=Reduction.mean)
    stack.callback(exchange.close)
    optimizer = Lion(model.parameters(), lr=1e-5, exchange=exchange)
    numbers = itertools.count()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        exchange.begin(next(numbers))
        loss(model).backward()
        assert exchange.finish().finite
        optimizer.step()

    return step


def _ddp(model: EnsembleModel, loss: Callable[[nn.Module], Tensor]) -> Callable[[], None]:
    """Return a training step of plain Lion on gradients that torch's DistributedDataParallel averages."""
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)  # our exchange sends no buffers either
    optimizer = Lion(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(wrapped).backward()
        optimizer.step()

    return step


def _network(job: dict[str, Any]) -> tuple[EnsembleModel, Callable[[nn.Module], Tensor]]:
    spec = benchmark_spec(*job["shape"], **job["config"])
    torch.manual_seed(0)
    model = EnsembleModel(spec, Climate.default(spec))
    Speed(Precision.float32, True).apply(model)
    batch = random_batch(spec, 1)

    def loss(module: nn.Module) -> Tensor:
        found = module(batch)
        distance = crps(Family.NORMAL, found.location, found.scale, torch.zeros_like(found.location)).mean()
        return distance + (found.spread - 1).square().mean()

    return model, loss


def interface_bytes() -> int:
    """Return the bytes that this rank has sent, by the kernel's counters.

    A host of its own is counted by its interface, headers included. All programs of a machine share the loopback:
    there, the TCP connections that this process holds are counted.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name != "lo":
        return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())
    return sum(_sent(int(entry.name)) for entry in Path("/proc/self/fd").iterdir() if _is_socket(entry))


def _is_socket(entry: Path) -> bool:
    try:
        return str(entry.readlink()).startswith("socket:")
    except FileNotFoundError:  # the descriptor that listed the folder
        return False


def _sent(descriptor: int) -> int:
    """Return the bytes that a socket has sent: tcpi_bytes_sent of linux/tcp.h, or 0 of one that is not of TCP."""
    with socket.socket(fileno=os.dup(descriptor)) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return 0
        return int.from_bytes(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)[200:], sys.byteorder)


def replicas(session: Session, job: dict[str, Any]) -> dict[str, dict[str, bool]]:
    """Check, for each number of bits, that replicas are equal bit for bit, and that a resumed run equals a whole one.

    Args:
        session: the ranks.
        job: `bits`, a list, and `steps`.
    """
    found = {}
    for bits in job["bits"]:
        whole = _train(session, bits, 0, job["steps"], None)
        half = _train(session, bits, 0, job["steps"] // 3, None)
        rest = _train(session, bits, job["steps"] // 3, job["steps"], half)
        digests = _gathered(session, [_digest(whole["weights"]), _digest(rest["weights"])])
        found[str(bits)] = {
            "replicas equal": len({first for first, _ in digests}) == 1,
            "resumed equal": all(first == second for first, second in digests),
            "exact zeros in gradients": bool(whole["zeros"]),
        }
    return found


def _train(session: Session, bits: int, first: int, last: int, state: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 333), nn.ReLU(), nn.Linear(333, 65), nn.ReLU(), nn.Linear(65, 3))
    sync = {"momentum_sync": MomentumSync.growing, "momentum_every": 10}
    config = OptimConfig(exchange=ExchangeName.vote, bits=bits, bucket_mb=0.02, **sync)  # type: ignore[arg-type]
    exchange = make_exchange(config, session.topology, reduction=Reduction.mean)
    optimizer = Lion(net.parameters(), lr=1e-3, exchange=exchange)
    if state is not None:
        for p, value in zip(net.parameters(), state["weights"], strict=True):
            p.data.copy_(value)
        restore_state(exchange, session.topology.size, lambda _: state["apart"])
    zeros = 0
    for step in range(first, last):
        seed = 1000 * step + session.topology.rank
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        exchange.begin(step)
        (net(x) - x[:, :3]).square().mean().backward()
        zeros += sum(int((p.grad == 0).sum()) for p in net.parameters() if p.grad is not None)
        assert exchange.finish().finite
        optimizer.step()
        exchange.after_step()
    own = own_state(exchange)
    apart = {} if own is None else {name: value.clone() for name, value in own.tensors.items()}
    exchange.close()
    return {"weights": [p.detach().clone() for p in net.parameters()], "apart": apart, "zeros": zeros}


def _digest(tensors: list[Tensor]) -> int:
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.contiguous().numpy().tobytes())
    return int.from_bytes(found.digest()[:7], "little")


def _gathered(session: Session, numbers: list[int]) -> list[list[int]]:
    own = torch.tensor(numbers)
    out = own.new_empty(session.topology.size * len(numbers))
    session.mesh.world.all_gather(out, own)
    return out.view(session.topology.size, -1).tolist()


WORK: dict[str, Callable[[Session, dict[str, Any]], Any]] = {
    "communication": communication,
    "steps": steps,
    "replicas": replicas,
}


if __name__ == "__main__":
    take_part(lambda session, job: WORK[job["work"]](session, job))
