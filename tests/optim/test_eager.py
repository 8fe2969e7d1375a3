"""Optimizers without torch's compiler: the numbers of torch's own, and no import of the compiler."""

import copy
import subprocess
import sys

import torch

from ensemble_ml.optim.lion import AdamW


def trained(optimizer_of, again):
    """Return the weights after five steps; after the third the state is saved and loaded, if `again`."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(5, 3), torch.randn(7, 5)
    optimizer = optimizer_of([{"params": [layer.weight]}], lr=1e-2, weight_decay=0.1)
    optimizer.add_param_group({"params": [layer.bias], "weight_decay": 0.0})
    for step in range(5):
        optimizer.zero_grad(set_to_none=step > 1)
        layer(x).square().sum().backward()
        optimizer.step()
        if again and step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return [layer.weight.detach(), layer.bias.detach()]


def test_adamw_is_that_of_torch_bit_for_bit():
    ours, theirs = trained(AdamW, True), trained(torch.optim.AdamW, False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_compiler_is_not_imported():
    """In a process of its own, where nothing else has imported it."""
    code = """
import sys, torch
from ensemble_ml.optim import Lion
from ensemble_ml.optim.lion import AdamW
for kind in (Lion, AdamW):
    layer = torch.nn.Linear(5, 3)
    optimizer = kind(layer.parameters(), lr=1e-2)
    optimizer.zero_grad()
    layer(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
