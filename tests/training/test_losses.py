"""Loss and validation scores against numbers worked out by hand and by scoringrules."""

from dataclasses import replace

import numpy as np
import pytest
import scoringrules
import torch

from ensemble_ml import distributions
from ensemble_ml.config import ModelConfig
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.loading import Batch
from ensemble_ml.models import Climate, EnsembleInput, EnsembleModel, ModelSpec, Prediction
from ensemble_ml.training.losses import Loss
from ensemble_ml.training.validation import c4, validate
from ensemble_ml.training.widths import beside_usual, widths_for

SPEC = ModelSpec(
    ModelConfig(hidden=8, max_hidden=8, depth=0), ("t", "q"), (500, 850), ("t2m",), (0, 24), (24,),
    tuple(np.linspace(90, -90, 9)), tuple(np.arange(16) * 22.5),
)  # fmt: skip
AREA = torch.from_numpy(SPEC.grid.area_weights()).float()
GENERATOR = torch.Generator().manual_seed(1)
P = 3, 1, 5, 9, 16
UPPER, FLAT = slice(0, 4), slice(4, 5)  # t and q at two levels each; t2m


def rand(*shape):
    return torch.rand(*shape, generator=GENERATOR) + 0.5


def case(count=(2.0, 4.0, 4.0)):
    prediction = Prediction(rand(*P), rand(*P), rand(*P))
    inputs = EnsembleInput(rand(3, 2, 5, 9, 16), rand(3, 2, 5, 9, 16), torch.tensor(count), torch.ones(3))
    return prediction, Batch(inputs, ["a", "b", "c"], rand(*P), rand(*P))


def loss_of(**changes):
    return Loss(SPEC, rand(1, 5), rand(7, 1, 5), AREA, **changes)


def test_against_an_independent_sum():
    prediction, batch = case()
    loss = loss_of(spread_weight=0.5)
    crps, spread, weight = 0.0, 0.0, 0.0
    for b in range(3):
        members = int(batch.inputs.count[b])
        for f, (name, _) in enumerate(SPEC.names):
            mu, sigma, y = (x[b, 0, f].numpy() for x in (prediction.location, prediction.scale, batch.truth))
            truncated = name == "q"
            score = scoringrules.crps_tnormal(y, mu, sigma, 0) if truncated else scoringrules.crps_normal(y, mu, sigma)
            crps += (score * AREA.numpy()).sum() / float(loss.error[0, f])
            square = (prediction.spread - batch.target_spread)[b, 0, f] ** 2
            spread += float((square * AREA).sum() / loss.spread_error[members, 0, f])
        weight += 5 * float(AREA.sum())
    found = loss(prediction, batch)
    assert found["crps"].item() == pytest.approx(crps / weight, rel=1e-4)
    assert found["spread"].item() == pytest.approx(spread / weight, rel=1e-4)
    assert found["loss"].item() == pytest.approx((crps + 0.5 * spread) / weight, rel=1e-4)


def test_missing_targets_weigh_nothing_and_leave_gradients_finite():
    prediction, batch = case()
    loss = loss_of()
    whole = loss(prediction, batch)["crps"]
    only = replace(batch, truth=batch.truth.clone(), target_spread=batch.target_spread.clone())
    only.truth[:, :, 3] = torch.nan
    only.target_spread[0] = torch.nan
    prediction.location.requires_grad_()
    found = loss(prediction, only)
    assert torch.isfinite(found["loss"]) and found["crps"] != whole
    found["loss"].backward()
    gradient = prediction.location.grad
    assert torch.isfinite(gradient).all() and not gradient[:, :, 3].any() and gradient[:, :, :2].abs().min() > 0
    nothing = replace(batch, truth=batch.truth * torch.nan)
    assert loss(prediction, nothing)["crps"].item() == 0


def test_a_short_batch_weighs_as_its_samples_do():
    prediction, batch = case()

    def part(rows):
        cut = {k: v[rows] for k, v in vars(prediction).items()}
        inputs = EnsembleInput(**{k: v[rows] for k, v in vars(batch.inputs).items() if v is not None})
        targets = {k: v[rows] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
        return Prediction(**cut), Batch(inputs, [], **targets)

    loss = loss_of()
    two, one, all_three = (loss(*part(rows))["loss"] for rows in (slice(0, 2), slice(2, 3), slice(0, 3)))
    assert all_three.item() == pytest.approx((2 * two + one).item() / 3, rel=1e-5)


def test_the_distance_to_a_teacher():
    """Squared differences in units of error^2 and spread_error, also where the truth is missing."""
    prediction, batch = case()
    own = loss_of(distill=0.25)
    unlike = replace(prediction, location=prediction.location.clone(), spread=prediction.spread.clone())
    unlike.location[:, :, UPPER] += 0.3
    unlike.spread[:, :, FLAT] -= 0.2
    unseen = replace(batch, truth=batch.truth.clone())
    unseen.truth[:, :, UPPER] = torch.nan
    plain = own(prediction, unseen)
    own.teacher = lambda inputs: prediction if inputs is batch.inputs else None
    same, other = own(prediction, unseen), own(unlike, unseen)
    assert same["distill"] == 0 and same["loss"] == plain["loss"]
    errors = own.spread_error[batch.inputs.count.long(), 0, 4]
    wanted = 3 * (0.3 / own.error[:, UPPER]).square().sum() + (0.2**2 / errors).sum()
    assert other["distill"].item() == pytest.approx(wanted.item() / (3 * 5 * 3), rel=1e-4)
    terms = other["crps"] + other["spread"] + 0.25 * other["distill"]
    assert other["loss"].item() == pytest.approx(terms.item(), rel=1e-5)


def test_heads_that_are_off_have_no_term():
    prediction, batch = case()
    no_spread = Prediction(prediction.location, prediction.scale)
    assert set(loss_of()(no_spread, batch)) == {"loss", "crps"}
    only_spread = Prediction(spread=prediction.spread)
    assert set(loss_of()(only_spread, batch)) == {"loss", "spread"}


@pytest.mark.parametrize(("n", "expected"), [(2, 0.7979), (3, 0.8862), (5, 0.9400), (10, 0.9727)])
def test_c4(n, expected):
    assert c4(n) == pytest.approx(expected, abs=1e-4)


class Fixed(EnsembleModel):
    """A model that predicts what it is given."""

    def __init__(self, prediction, spec=SPEC):
        super().__init__(spec, Climate.default(spec))
        self.prediction = prediction

    def forward(self, x):
        return self.prediction


def test_scores_against_an_independent_sum():
    prediction, batch = case(count=(4.0, 4.0, 4.0))
    # Truth never below zero, so the truncated normal needs no special case here.
    found = validate(Fixed(prediction), [batch], full_size=10, area=AREA).scores
    ours, raw = [], []
    mean, spread = (x[:, 1:] for x in (batch.inputs.mean, batch.inputs.spread))
    for f, (name, _) in enumerate(SPEC.names):
        at = (slice(None), 0, f)
        mu, sigma, y = (x[at].numpy() for x in (prediction.location, prediction.scale, batch.truth))
        truncated = name == "q"
        score = scoringrules.crps_tnormal(y, mu, sigma, 0) if truncated else scoringrules.crps_normal(y, mu, sigma)
        ours.append((score * AREA.numpy()).mean())
        wide = np.sqrt(1.25) * spread[at].numpy()
        raw.append((scoringrules.crps_normal(y, mean[at].numpy(), wide) * AREA.numpy()).mean())
    assert found["crps_ratio"] == pytest.approx(np.exp(np.mean(np.log(ours) - np.log(raw))), rel=1e-4)
    target = batch.target_spread
    squares = [((p - target) ** 2 * AREA).mean((0, -2, -1)) for p in (prediction.spread, c4(10) / c4(4) * spread)]
    ratio = (squares[0] / squares[1]).log().mean().div(2).exp().item()
    assert found["spread_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert found["score"] == pytest.approx((found["crps_ratio"] * ratio) ** 0.5)


def test_scores_do_not_depend_on_the_batches():
    prediction, batch = case(count=(4.0, 4.0, 4.0))
    model = Fixed(prediction)
    whole = validate(model, [batch], full_size=10, area=AREA).scores

    def parts():
        for row in range(3):
            model.prediction = Prediction(**{k: v[[row]] for k, v in vars(prediction).items()})
            inputs = EnsembleInput(**{k: v[[row]] for k, v in vars(batch.inputs).items() if v is not None})
            targets = {k: v[[row]] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
            yield Batch(inputs, [], **targets)

    assert validate(model, parts(), full_size=10, area=AREA).scores == pytest.approx(whole, rel=1e-6)


def test_one_member_is_compared_with_the_climate():
    prediction, batch = case(count=(1.0, 1.0, 1.0))
    batch.inputs.spread.zero_()
    model = Fixed(prediction)
    climatology, target = model.heads.climatology, batch.target_spread
    climatology.copy_(rand(*climatology.shape))
    squares = [((spread - target) ** 2 * AREA).mean((0, -2, -1)) for spread in (prediction.spread, climatology)]
    ratio = (squares[0] / squares[1]).log().mean().div(2).exp().item()
    found = validate(model, [batch], full_size=10, area=AREA).scores
    assert found["spread_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert np.isfinite(found["crps_ratio"])


def test_no_target_gives_no_score():
    prediction, batch = case()
    bare = Batch(batch.inputs, batch.init_time)
    assert validate(Fixed(prediction), [bare], full_size=10, area=AREA).scores == {}
    assert validate(Fixed(prediction), [], full_size=10, area=AREA).scores == {}
    all_in = replace(batch, truth=None, target_spread=batch.target_spread * torch.nan)
    assert validate(Fixed(prediction), [all_in], full_size=10, area=AREA).scores == {}


@pytest.mark.parametrize("ours", [1e-5, 1e-9, 1e-12])
def test_a_field_in_which_there_is_nothing_to_predict_counts_for_nothing(ours):
    prediction, batch = case(count=(4.0, 4.0, 4.0))
    for values in (batch.truth, batch.inputs.mean, batch.inputs.spread, batch.target_spread):
        values[:, :, FLAT] = 0
    for values in (prediction.location, prediction.scale, prediction.spread):
        values[:, :, FLAT] = ours
    found = validate(Fixed(prediction), [batch], full_size=10, area=AREA).scores
    batch.truth[:, :, FLAT] = batch.target_spread[:, :, FLAT] = torch.nan
    assert found == validate(Fixed(prediction), [batch], full_size=10, area=AREA).scores


def test_a_perfect_field_counts_for_a_lot_but_not_for_all():
    prediction, batch = case(count=(4.0, 4.0, 4.0))
    prediction.spread[:, :, FLAT] = batch.target_spread[:, :, FLAT]
    found = validate(Fixed(prediction), [batch], full_size=10, area=AREA).scores
    prediction.spread[:, :, FLAT] += 1e-6
    again = validate(Fixed(prediction), [batch], full_size=10, area=AREA).scores
    assert 0 < found["spread_ratio"] == pytest.approx(again["spread_ratio"])


def test_a_broken_prediction_is_no_good_score():
    prediction, batch = case()
    prediction.location[0, 0, 0, 3, 3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        validate(Fixed(prediction), [batch], full_size=10, area=AREA)


def test_dates_on_which_nothing_happens_leave_widths_alone():
    """A dry day: truth and members are zero, and the law is as wide as rainy days want it."""
    prediction, batch = case(count=(4.0, 4.0, 4.0))
    wanted = validate(Fixed(prediction), [batch] * 4, full_size=10, area=AREA).widths
    dry_prediction, dry = case(count=(4.0, 4.0, 4.0))
    for values in (dry.truth, dry.inputs.mean, dry.inputs.spread):
        values[:, :, FLAT] = 0
    model = Fixed(prediction)

    def batches():
        yield from [batch] * 4
        model.prediction = dry_prediction
        yield dry

    found = validate(model, batches(), full_size=10, area=AREA).widths
    assert found[0][4] == pytest.approx(wanted[0][4], rel=1e-6) and found[0][0] != wanted[0][0]


def test_widths_make_the_mean_variance_that_of_the_errors():
    """Of every field; the same factors whatever the batches, and one where nothing is known."""
    prediction, batch = case(count=(4.0, 4.0, 4.0))
    batch.truth[:, :, FLAT] = torch.nan
    model = Fixed(prediction)
    widths = torch.tensor(validate(model, [batch, batch], full_size=10, area=AREA).widths)
    assert widths.shape == (1, 5) and widths[0, 4] == 1
    assert validate(model, [batch], full_size=10, area=AREA).widths == [[1.0] * 5]  # three dates say nothing
    model.prediction = prediction.widened(widths, SPEC.families)
    mean, deviation = torch.empty_like(batch.truth), torch.empty_like(batch.truth)
    for f, family in enumerate(SPEC.families):
        found = distributions.moments(family, model.prediction.location[:, :, f], model.prediction.scale[:, :, f])
        mean[:, :, f], deviation[:, :, f] = found
    normal = [f for f, family in enumerate(SPEC.families[UPPER]) if family is Family.NORMAL]
    assert normal and len(normal) < 4
    variance, error = ((x * AREA).mean((0, -2, -1)) for x in (deviation**2, (mean - batch.truth) ** 2))
    torch.testing.assert_close(variance[:, normal], error[:, normal], rtol=1e-4, atol=0)
    torch.testing.assert_close(model.prediction.location[:, :, normal], prediction.location[:, :, normal])
    again = torch.tensor(validate(model, [batch, batch], full_size=10, area=AREA).widths)
    torch.testing.assert_close(again[:, normal], torch.ones(1, len(normal)), rtol=1e-4, atol=0)


def width_of(spec, given, truth, members):
    """Of the second of two surface fields, forecast as `given`; `members`: mean and spread (40, 1, 2, 9, 16)."""
    fields = (values.expand(-1, 2, -1, -1, -1).contiguous() for values in members)
    inputs = EnsembleInput(*fields, torch.full((40,), 4.0), torch.ones(40))
    model = Fixed(Prediction(*given), spec)
    batch = Batch(inputs, [""] * 40, truth=truth)
    [[_, width]] = validate(model, [batch], full_size=10, area=AREA).widths
    return width


@pytest.mark.parametrize("wrong", [1.0, 1.3, 0.75])
def test_the_width_of_rain_is_the_one_with_the_least_crps(wrong):
    """Rain drawn from the very law that is forecast, most points nearly dry: its variance lies in rain that no sample
    shows, and by mean squares a law that is right would be narrowed by a fifth."""
    spec, law = replace(SPEC, variables=(), levels=(), surface=("t2m", "tp")), Family.CENSORED_SHIFTED_GAMMA
    generator = torch.Generator().manual_seed(5)
    shape = 40, 1, 2, 9, 16
    scale = torch.full(shape, 1e-3)
    location = scale * (torch.rand(shape, generator=generator) * 6.5 - 4)
    truth = distributions.quantile(law, location, scale, torch.rand(shape, generator=generator))
    given = distributions.widen(law, location, scale, torch.tensor(wrong))
    width = width_of(spec, given, truth, (location.clamp(min=0), scale))
    assert width == pytest.approx(1 / wrong, rel=0.06)


@pytest.mark.parametrize("name", ["tcc", "ws10"])
@pytest.mark.parametrize("wrong", [0.6, 0.8, 1.0, 1.3, 1.8])
def test_laws_with_bounds_get_the_variance_of_their_errors(name, wrong):
    """Many points near a bound, where the deviation grows more slowly than the scale."""
    spec = replace(SPEC, variables=(), levels=(), surface=("t2m", name))
    law = spec.families[1]
    generator = torch.Generator().manual_seed(5)
    shape = 40, 1, 2, 9, 16
    scale = torch.full(shape, 0.3)
    location = torch.rand(shape, generator=generator) * 1.4 - 0.2
    truth = distributions.quantile(law, location, scale, torch.rand(shape, generator=generator))
    given = distributions.widen(law, location, scale, torch.tensor(wrong))
    width = width_of(spec, given, truth, (location.clamp(min=0), scale))
    assert width == pytest.approx(1 / wrong, rel=0.06)
    mean, deviation = distributions.moments(law, *distributions.widen(law, *given, torch.tensor(width)))
    error, variance = ((x[:, :, 1] * AREA).mean() for x in ((mean - truth) ** 2, deviation**2))
    assert variance / error == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
    ("law", "given", "true"),
    [
        (Family.DOUBLY_CENSORED_NORMAL, (0.7, 0.4), (0.4, 0.6)),
        (Family.DOUBLY_CENSORED_NORMAL, (0.8, 0.6), (0.3, 0.6)),
        (Family.TRUNCATED_NORMAL, (0.0, 1.0), (0.0, 1.3)),
        (Family.TRUNCATED_NORMAL, (1.0, 1.0), (2.0, 1.3)),
    ],
)
def test_a_width_that_cannot_reach_the_errors_does_no_harm(law, given, true):
    """Of one mean, a law between bounds has a largest deviation; errors of a wrong mean may be beyond it."""
    name = "tcc" if law is Family.DOUBLY_CENSORED_NORMAL else "ws10"
    spec = replace(SPEC, variables=(), levels=(), surface=("t2m", name))
    assert spec.families[1] is law
    generator, shape = torch.Generator().manual_seed(5), (40, 1, 2, 9, 16)
    places = [[torch.full(shape, value) for value in pair] for pair in (given, true)]
    truth = distributions.quantile(law, *places[1], torch.rand(shape, generator=generator))
    width = width_of(spec, places[0], truth, places[0])
    wider = distributions.widen(law, *places[0], torch.tensor(width))
    before, after = (distributions.crps(law, *pair, truth).mean() for pair in (places[0], wider))
    assert after <= before * 1.001 and 0.5 < width < 2


def test_widths_are_bounded():
    prediction, batch = case()
    prediction.scale[:, :, UPPER] *= 1e-4
    prediction.scale[:, :, FLAT] *= 1e4
    [found] = validate(Fixed(prediction), [batch, batch], full_size=10, area=AREA).widths
    assert found == pytest.approx([3, 3, 3, 3, 1 / 3])


def test_widths_go_with_the_number_of_members():
    """Their logarithm with 1/M between those that are known, and no further; what few dates tell of stays one."""
    found = beside_usual({1: [[2.0, 1.0]], 2: [[1.0, 1.5]], 5: [[1.25, 1.2]]}, 5)
    assert found == {"1": [[1.6, 1.0]], "2": [[1.0, 1.25]], "5": [[1.0, 1.0]]}
    known = {"1": [[1.6]], "2": [[1.2]], "5": [[1.0]]}
    count = torch.tensor([1.0, 2.0, 3.0, 5.0, 50.0])
    three = 1.2 ** ((1 / 3 - 1 / 5) / (1 / 2 - 1 / 5))
    assert widths_for(count, known).flatten().tolist() == pytest.approx([1.6, 1.2, three, 1.0, 1.0])
    assert widths_for(count, {"5": [[1.0]]}).shape == (5, 1, 1)
