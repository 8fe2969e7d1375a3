"""Buckets: their order, and that backward fills them while it goes on."""

import pytest
import torch
from models.small_models import awake, make_climate, make_input, make_spec

from ensemble_ml.distributed.communicator import NullCommunicator
from ensemble_ml.distributed.exchange import Arrivals, GradientAverage, make_buckets
from ensemble_ml.models import EnsembleModel
from ensemble_ml.optim import Lion


def places(buckets):
    return [[slot.index for slot in bucket.slots] for bucket in buckets]


def test_late_ones_come_last_and_each_once():
    params = [torch.zeros(64) for _ in range(6)]
    assert places(make_buckets(params, 128)) == [[5, 4], [3, 2], [1, 0]]
    assert places(make_buckets(params, 128, late={1, 4})) == [[5, 3], [2, 0], [4, 1]]
    assert places(make_buckets(params, 1, late={5})) == [[4], [3], [2], [1], [0], [5]]


@pytest.fixture
def model():
    torch.manual_seed(0)
    spec = make_spec(points=0)
    found = EnsembleModel(spec, make_climate(spec))
    awake(found)
    return found


def backward(model):
    prediction = model(make_input(model.spec))
    sum(v.square().mean() for v in vars(prediction).values() if v is not None).backward()


def test_most_gradients_can_travel_before_backward_has_ended(model):
    """Stem biases and the first scales are what backward reaches last: no weight waits for them."""
    exchange = GradientAverage(NullCommunicator(), bucket_mb=0.01)
    Lion(model.param_groups(), lr=1e-3, exchange=exchange)
    exchange.ready()
    events = []
    for p in exchange.params:
        p.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    Arrivals(exchange.params, exchange.buckets, lambda number: events.append(exchange.buckets[number].elements))
    exchange.begin(0)
    backward(model)
    end = len(events) - events[::-1].index("gradient")
    before = sum(e for e in events[:end] if e != "gradient")
    exchange.finish()
    exchange.close()
    assert len(exchange.buckets) > 5
    assert before > 0.5 * sum(bucket.elements for bucket in exchange.buckets)
