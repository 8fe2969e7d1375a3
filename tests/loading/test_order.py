"""The order of dates and members: fixed for ever by the seed, uniform, and directly addressable."""

import numpy as np
import pytest

from ensemble_ml.errors import UserError
from ensemble_ml.loading.order import Order, Stream, epoch_order, member_subset, words


def test_known_answers():
    # These numbers are what a seed means; a change of them breaks the resumption of every run.
    assert epoch_order(0, 0, 8).tolist() == ORDER_0_0
    assert epoch_order(7, 1000, 8).tolist() == ORDER_7_1000
    assert member_subset(0, 3, 5, 10, [1, 2, 3, 5, 8, 10]).tolist() == MEMBERS


ORDER_0_0 = [5, 3, 7, 2, 4, 1, 0, 6]
ORDER_7_1000 = [0, 3, 7, 1, 4, 2, 6, 5]
MEMBERS = [0]


def test_words_of_different_places_differ():
    places = [(s, t, e, i) for s in (0, 1) for t in Stream for e in (0, 1) for i in (0, 1)]
    drawn = {place: words(*place, 4).tobytes() for place in places}
    assert len(set(drawn.values())) == len(places)
    assert np.array_equal(words(1, Stream.DATES, 2, 3, 9)[:4], words(1, Stream.DATES, 2, 3, 4))


def test_every_epoch_is_a_permutation():
    seen = {tuple(epoch_order(3, epoch, 11)) for epoch in range(50)}
    assert len(seen) == 50
    assert all(sorted(order) == list(range(11)) for order in seen)


def test_order_is_uniform():
    first = np.bincount([epoch_order(1, epoch, 5)[0] for epoch in range(5000)], minlength=5)
    assert np.abs(first - 1000).max() < 120  # about 4 standard deviations


def test_member_subsets_are_sorted_distinct_and_uniform():
    draws = [member_subset(1, epoch, 2, 6, [1, 3, 6, 9]) for epoch in range(3000)]
    assert all(np.array_equal(d, np.unique(d)) for d in draws)
    sizes = np.bincount([len(d) for d in draws], minlength=7)
    assert sizes[[0, 2, 4, 5]].sum() == 0 and np.abs(sizes[[1, 3, 6]] - 1000).max() < 110
    single = np.bincount([d[0] for d in draws if len(d) == 1], minlength=6)
    assert np.abs(single / single.sum() - 1 / 6).max() < 0.05


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"data.members=\[8, 10\].*at most 5"):
        member_subset(0, 0, 0, 5, [8, 10])


@pytest.mark.parametrize(("n", "batch"), [(10, 4), (8, 4), (3, 5), (1, 1)])
def test_steps_cover_each_epoch_once(n, batch):
    order = Order(seed=9, n=n, batch_size=batch)
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        parts = [order.step(s) for s in steps]
        assert {e for e, _ in parts} == {epoch}
        assert np.concatenate([s for _, s in parts]).tolist() == epoch_order(9, epoch, n).tolist()
        assert all(len(s) == batch for _, s in parts[:-1])
