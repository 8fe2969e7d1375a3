"""Ensemble copula coupling: the law's quantiles in the raw ensemble's order."""

import pytest
import torch
from scipy import stats

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.models.rivals.coupling import couple


def test_quantiles_stand_in_raw_order():
    members = torch.tensor([[3.0, -1.0], [1.0, 0.0], [2.0, 5.0]])
    found = couple(members, torch.tensor([10.0, 20.0]), torch.tensor([2.0, 1.0]))
    wanted = torch.tensor(stats.norm.ppf([0.25, 0.5, 0.75]), dtype=torch.float32)
    torch.testing.assert_close(found[:, 0], 10 + 2 * wanted[[2, 0, 1]])
    torch.testing.assert_close(found[:, 1], 20 + wanted)


def test_censored_members_are_never_negative_and_keep_ranks():
    members = torch.rand(7, 30).double()
    found = couple(members, torch.zeros(30).double(), torch.ones(30).double(), Family.CENSORED_NORMAL)
    assert (found >= 0).all() and (found == 0).any()
    later = found.gather(0, members.argsort(0)).diff(dim=0)
    assert (later >= 0).all()


def test_one_member_is_refused():
    with pytest.raises(UserError, match="needs two or more"):
        couple(torch.zeros(1, 3), torch.zeros(3), torch.ones(3))
