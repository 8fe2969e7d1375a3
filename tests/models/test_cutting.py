"""Cutting channels: the groups are complete, and a model whose dropped channels say nothing keeps its numbers."""

from __future__ import annotations

import pytest
import torch
from small_models import make_input, make_model, make_spec, tensors

from ensemble_ml.config import Vertical
from ensemble_ml.models import Climate, build_model
from ensemble_ml.models.compact import cut, groups, resized


@pytest.mark.parametrize("vertical", list(Vertical))
def test_channels_that_nobody_reads_can_be_cut_exactly(vertical):
    """Everything that reads a dropped channel is zero; what makes it is not."""
    spec = make_spec(depth=2, hidden=8, max_hidden=16, blocks=2, vertical=vertical)
    model = make_model(spec).double()
    state = model.state_dict()
    every = groups(spec, state)
    generator = torch.Generator().manual_seed(3)
    kept = {
        name: sorted(torch.randperm(g.size, generator=generator)[: g.size // 2].tolist()) for name, g in every.items()
    }
    for name, group in every.items():
        dropped = sorted(set(range(group.size)) - set(kept[name]))
        for key, axis in group.parts:
            if axis == 1:
                state[key].index_fill_(1, torch.tensor(dropped), 0)
    model.load_state_dict(state)
    small_spec, small_state = cut(spec, state, kept)
    small = build_model(small_spec, Climate.default(small_spec)).double()
    small.load_state_dict(small_state)
    x = make_input(spec).to(torch.float64)
    for key, values in tensors(model(x)).items():
        torch.testing.assert_close(tensors(small(x))[key], values, rtol=1e-12, atol=1e-12)
    assert small_spec.config.widths == [4, 8, 8] and small_spec.config.points == 4


@pytest.mark.parametrize("vertical", list(Vertical))
def test_groups_hold_every_axis_of_their_size(vertical):
    """Another size of one group changes just the tensors of its parts."""
    spec = make_spec(depth=2, vertical=vertical)
    shapes = {name: tuple(values.shape) for name, values in make_model(spec).state_dict().items()}
    for name, group in groups(spec, shapes).items():
        other = resized(spec, {name: group.size + 4})
        for key, values in build_model(other, Climate.default(other)).state_dict().items():
            grown = list(shapes[key])
            for _, axis in [part for part in group.parts if part[0] == key]:
                grown[axis] += 4
            assert tuple(values.shape) == tuple(grown), (name, key)


def test_what_is_not_named_stays():
    spec = make_spec(depth=1)
    state = make_model(spec).state_dict()
    same, found = cut(spec, state, {})
    assert all(torch.equal(found[key], values) for key, values in state.items())
    assert same.config.channels() == spec.config.channels()
