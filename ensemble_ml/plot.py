"""Draw three common figures: a map, quantiles at a place against lead time, and the reliability of probabilities.

Each function returns a matplotlib Figure: `figure.savefig("map.png")` writes it, and a notebook shows it. Style and
colours are those of the reports. matplotlib is imported when a figure is drawn, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from ensemble_ml.errors import UserError
from ensemble_ml.fields import field as registered
from ensemble_ml.units import same_units
from ensemble_ml.wording import date_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ensemble_ml.verification.probability import Reliability

_LEAD = ("forecast_period", "lead_time")
_START = ("forecast_reference_time", "init_time")

__all__ = ["fan", "map", "reliability"]


def map(  # named after the figure; it hides the builtin within this file
    field: xr.DataArray, *, land: xr.DataArray | None = None, title: str | None = None, **colours: Any
) -> Figure:
    """Draw a field on a latitude-longitude map.

    Args:
        field: Values over latitude and longitude (degrees); other dimensions have length one. NaN shows as grey.
        land: Land fraction over the same grid, for coasts, such as `lsm` of a store; None draws those of Natural Earth.
        title: Title above the map; None takes the field's name, times, level, quantile and threshold.
        **colours: `cmap`, `vmin`, `vmax` and other arguments of matplotlib's pcolormesh.

    Returns:
        The figure.

    Raises:
        UserError: The field or `land` is no DataArray, lacks latitude or longitude, as a dimension or a coordinate, or
            has another dimension longer than one; the field's grid is not regular; `land` lacks points of the field; or
            matplotlib is not installed.

    Example:
        >>> import ensemble_ml as eml
        >>> ensemble = eml.open("archive/ensemble", static="archive/static.grib")
        >>> spread = ensemble["t2m"].isel(init_time=0, lead_time=-1).std("realization", ddof=1, keep_attrs=True)
        >>> eml.plot.map(spread, land=ensemble["lsm"], title="spread of 2 m temperature").savefig("spread.png")
    """
    _need_matplotlib()
    from ensemble_ml.grid import canonical
    from ensemble_ml.verification.plots import draw_map, new_figure

    for name, one in (("field", field), ("land", land)):
        if one is not None:
            _check_array(name, one)
    flat = _flat(field)
    grid, rows, columns = canonical(flat["latitude"].values, flat["longitude"].values)
    inside = (rows[:, None], columns)
    coasts = None if land is None else _on_grid_of(flat, _flat(land)).values[inside]
    height = 6.4 * np.ptp(grid.latitude) / max(np.ptp(grid.longitude), 1e-6)
    figure, axes = new_figure(7.6, float(np.clip(height, 2.0, 6.4)) + 0.5)
    words = title if title is not None else _title(field)
    mesh = draw_map(axes[0, 0], flat.values[inside], grid, coasts, words, **{"cmap": "viridis", **colours})
    figure.colorbar(mesh, ax=axes[0, 0], shrink=0.8, label=_scale(field))
    return figure


def fan(
    forecast: xr.Dataset,
    variable: str,
    latitude: float,
    longitude: float,
    *,
    level: int | None = None,
    truth: xr.DataArray | None = None,
) -> Figure:
    """Draw the predicted quantiles of one forecast at a place against lead time, with the truth where it is given.

    Args:
        forecast: The result of `Model.predict`, of one initialisation time.
        variable: Short name, such as "t2m".
        latitude: Latitude of the place in degrees; the nearest grid point is drawn.
        longitude: Longitude of the place in degrees.
        level: Pressure level in hPa, for a variable on levels; None at the surface, or if one level was selected
            already.
        truth: The truth at the forecast's leads or more, at the place or on a grid, in the forecast's units.

    Returns:
        The figure.

    Raises:
        UserError: The forecast has no quantiles of the variable; forecast or truth lacks the level or lead times, or
            has several initialisation times; the truth has another one, level or units; the place is outside of the
            grid; the truth lacks a lead of the forecast, or is no DataArray; leads are no timedeltas; or matplotlib is
            not installed.

    Example:
        >>> import ensemble_ml as eml
        >>> forecast = eml.load("runs/first").predict("archive/ensemble", members=2, dates=["2003-01-09"])
        >>> eml.plot.fan(forecast, "t2m", 48.2, 16.4).savefig("fan.png")
    """
    _need_matplotlib()
    from ensemble_ml.verification.plots import new_figure

    quantiles = _quantiles_of(forecast, variable, level)
    if truth is not None:
        _check_array("truth", truth)
    values = _by_lead(_at(quantiles, latitude, longitude, level))
    if "quantile" not in values.dims:  # one was selected
        values = values.expand_dims("quantile")
    values = values.transpose("quantile", "lead").compute()
    hours = values["lead"].values
    levels = values["quantile"].values
    figure, axes = new_figure(6.4, 3.4)
    axis = axes[0, 0]
    _bands(axis, hours, levels, values.values)
    if truth is not None:
        seen = _by_lead(_at(truth.rename(truth.name or "truth"), latitude, longitude, level))
        if lacking := sorted(set(hours) - set(seen["lead"].values)):
            raise UserError(f"truth: has no values at {', '.join(f'{one:g}' for one in lacking)} h of the forecast")
        _check_same("truth", quantiles, truth)
        _check_units("truth", truth, quantiles.attrs.get("units", ""))
        axis.plot(hours, seen.sel(lead=hours).values, "x", color="black", ms=7, mew=1.6, label="truth")
    units = quantiles.attrs.get("units", registered(variable).units)
    axis.set_xlabel("lead time, h")
    axis.set_ylabel(f"{registered(variable).long_name}, {units}")
    axis.set_xticks(hours)
    drawn = [float(values.coords.get(one, given)) for one, given in (("latitude", latitude), ("longitude", longitude))]
    axis.set_title(f"{variable} at {drawn[0]:g} N, {drawn[1]:g} E", loc="left")
    axis.legend(frameon=False, fontsize=7.5)
    return figure


def reliability(
    probability: xr.DataArray | Mapping[str, xr.DataArray], event: xr.DataArray, *, bins: int = 10, title: str = ""
) -> Figure:
    """Draw how often an event happened against the probability that was forecast for it.

    On a latitude-longitude grid, points are weighted by the exact area of their cells.

    Args:
        probability: Forecast probabilities, 0 to 1; or several by the names that the legend shows.
        event: Outcome, true or false (or 1 and 0), at the same coordinates; NaN is left out. If the probabilities have
            a dimension of thresholds, as `tp_prob_above` of a forecast, give the truth in the variable's units: it is
            compared with each threshold. It may have more times and places than the probabilities.
        bins: Number of bins of equal width in which the probabilities are counted.
        title: Title above the curves.

    Returns:
        The figure: the curves, above them how often each probability was forecast, and thresholds side by side.

    Raises:
        UserError: Coordinates, starts, lead times, levels or units differ, the truth lacks some coordinates, event or
            truth has several values for one probability, values are no probabilities or events, no forecast is given,
            one or the event is no DataArray, `bins` is below 1, or matplotlib is not installed.

    Example:
        >>> import ensemble_ml as eml
        >>> store = eml.open("store.zarr")
        >>> data = store.isel(lead_time=[-1])
        >>> wet = (data["tp"] > 0.001).mean("realization")
        >>> eml.plot.reliability({"raw": wet}, data["tp_truth"] > 0.001, title="rain over 1 mm").savefig("rain.png")
        >>> forecast = eml.load("runs/first").predict(store, members=2, dates=["2003"], thresholds={"tp": [0.001]})
        >>> eml.plot.reliability(forecast["tp_prob_above"], store["tp_truth"]).savefig("thresholds.png")
    """
    _need_matplotlib()
    from ensemble_ml.verification import plots

    several = probability if isinstance(probability, Mapping) else {"forecast": probability}
    for name, one in (*several.items(), ("event", event)):
        _check_array(name, one)
    panels: dict[str, dict[str, Reliability]] = {}
    for name, one in several.items():
        for words, shares, happened in _events(name, one, event):
            panel = panels.setdefault(", ".join(filter(None, (title, words))), {})
            panel[name] = _table(name, shares, happened, bins)
    if not panels:
        raise UserError("probability: holds no forecast; give one, or several by their names")
    return plots.reliability(panels)


def _events(
    name: str, probability: xr.DataArray, event: xr.DataArray
) -> Iterator[tuple[str, xr.DataArray, xr.DataArray]]:
    """Yield each threshold in words, its probabilities, and whether it was exceeded.

    Without thresholds, the words are empty, and probabilities and event are those given.
    """
    axis = next((str(dim) for dim in probability.dims if str(dim).startswith("threshold_")), None)
    if axis is None:
        yield "", probability, event
        return
    if event.dtype == bool:
        remedy = f"give the truth in its units, or choose one threshold, as with isel({axis}=0)"
        raise UserError(f"{name}: has probabilities along {axis}, but the event is for one threshold; {remedy}")
    # The prediction of a lazy forecast is computed once here, for all thresholds.
    shares, truth = probability.compute(), _at_times_of(name, event, probability).compute()
    units = shares[axis].attrs.get("units", "")
    _check_units(name, truth, units)
    for at, value in enumerate(shares[axis].values):
        words = f"over {value:g} {units}".strip()
        yield words, shares.isel({axis: at}, drop=True), (truth > value).where(truth.notnull())


def _at_times_of(name: str, truth: xr.DataArray, probability: xr.DataArray) -> xr.DataArray:
    """Return the truth at the times and places of the probabilities, with its time axes named as theirs."""
    from ensemble_ml.verification.api import at_places_of

    for axis in (_START, _LEAD):
        ours = [spelt for spelt in axis if spelt in probability.coords]
        theirs = [spelt for spelt in axis if spelt in truth.dims]
        truth = truth.rename(dict(zip(theirs, ours, strict=False)))
    # If one time or level of the forecast was selected, it is a coordinate without a dimension. It is selected from the
    # truth here, too.
    shared = {dim: probability[dim].values for dim in truth.dims if dim in probability.coords}
    try:
        if {"latitude", "longitude"} <= set(truth.dims) & set(probability.dims):
            # Longitudes of a region across Greenwich begin below zero, and files may hold single precision.
            truth = at_places_of(truth, probability)
        return truth.sel(shared)
    except (KeyError, ValueError) as error:
        raise UserError(f"{name}: the truth lacks some of its times or places ({error})") from error


def _table(name: str, probability: xr.DataArray, event: xr.DataArray, bins: int) -> Reliability:
    """Return how often an event happened in each bin of its probability."""
    from ensemble_ml.verification.api import area_weights
    from ensemble_ml.verification.checks import check_probability
    from ensemble_ml.verification.probability import Reliability

    # Repeated along a dimension that only the event has, a probability would be compared with other dates or places.
    if more := [str(dim) for dim, size in event.sizes.items() if dim not in probability.dims and size != 1]:
        raise UserError(f"{name}: event or truth has several values along {', '.join(more)}; choose one, as with isel")
    _check_same("event", probability, event)
    try:
        p, o = xr.align(probability, event, join="exact", copy=False)
        p, o = xr.broadcast(p, o)
    except ValueError as error:
        raise UserError(f"{name}: its coordinates are not those of the event ({error})") from error
    # With equal weights, the many small cells near the poles would count too much.
    on_grid = {"latitude", "longitude"} <= set(p.dims)
    weights = area_weights(p).broadcast_like(p) if on_grid else xr.ones_like(p, dtype=np.float64)
    # The arrays are compared by position, so their axes must have the same order.
    shares, happened = (np.asarray(part.transpose(*p.dims).values, np.float64) for part in (p, o))
    check_probability(name, shares)
    table = Reliability.zeros(bins)
    there = np.isfinite(shares) & np.isfinite(happened)
    table.record(shares, happened, weights.transpose(*p.dims).values, there)
    return table


def _bands(axis: Any, hours: np.ndarray, levels: np.ndarray, values: np.ndarray) -> None:
    """Draw quantiles (quantile, lead): the one nearest to the median, and bands from those below it to counterparts.

    The counterpart of a quantile of level p is the one whose level is nearest to 1 - p.
    """
    from ensemble_ml.verification.svg import BLUE

    for low in np.flatnonzero(levels < 0.5 - 1e-9):
        high = int(np.abs(levels - (1 - levels[low])).argmin())
        label = f"{100 * levels[low]:g} to {100 * levels[high]:g} %"
        axis.fill_between(hours, values[low], values[high], color=BLUE, alpha=0.22, lw=0, label=label)
    middle = int(np.abs(levels - 0.5).argmin())
    axis.plot(hours, values[middle], "o-", color=BLUE, ms=4, label=f"{100 * levels[middle]:g} %")


def _quantiles_of(forecast: xr.Dataset, variable: str, level: int | None) -> xr.DataArray:
    """Return the quantiles of a variable; refuse a forecast that has none, or none on levels if one is asked for."""
    if not isinstance(forecast, xr.Dataset):
        raise UserError(f"forecast: is {type(forecast).__name__}; give the Dataset that predict returns")
    name = f"{variable}_quantile"
    if name not in forecast:
        there = ", ".join(sorted(str(one).removesuffix("_quantile") for one in forecast if "_quantile" in str(one)))
        raise UserError(f"{variable}: the forecast has no quantiles of it; it has some of {there or 'nothing'}")
    if level is not None and "level" not in forecast[name].coords:
        raise UserError(f"level={level}: the forecast of {variable} has no levels; leave it out")
    return forecast[name]


def _check_array(name: str, given: Any) -> None:
    """Refuse what is no DataArray, such as a Dataset of which no variable was chosen."""
    if isinstance(given, xr.Dataset):
        raise UserError(f"{name}: is a Dataset; choose one of its variables: {', '.join(str(one) for one in given)}")
    if not isinstance(given, xr.DataArray):
        raise UserError(f"{name}: is {type(given).__name__}; give an xarray DataArray")


def _need_matplotlib() -> None:
    """Raise a UserError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401 - only to find out if it is installed
    except ModuleNotFoundError as error:
        raise UserError("matplotlib: not installed, and eml.plot draws with it; pip install matplotlib") from error


def _check_degrees(field: xr.DataArray) -> None:
    """Refuse a field on a grid whose axes have no coordinates; xarray would give the numbers of the points."""
    from ensemble_ml.verification.pointwise import axis_of

    for axis in ("latitude", "longitude"):
        axis_of(field, axis)


def _flat(field: xr.DataArray) -> xr.DataArray:
    """Return a field over latitude and longitude, computed and without its other axes, which must be of length one."""
    more = [dim for dim in field.dims if dim not in ("latitude", "longitude")]
    if several := [str(dim) for dim in more if field.sizes[dim] != 1]:
        raise UserError(f"{field.name}: has several values along {', '.join(several)}; choose one, as with isel")
    if lacking := [dim for dim in ("latitude", "longitude") if dim not in field.dims]:
        held = ", ".join(str(dim) for dim in field.dims) or "none"
        raise UserError(f"{field.name}: has no dimension {lacking[0]} (it has {held}); a map needs a field on a grid")
    _check_degrees(field)
    return field.squeeze(more, drop=True).transpose("latitude", "longitude").compute()


def _on_grid_of(field: xr.DataArray, land: xr.DataArray) -> xr.DataArray:
    """Return land (latitude, longitude) at the points of a field, which may come in another order."""
    from ensemble_ml.verification.api import at_places_of

    try:
        return at_places_of(land, field)
    except ValueError as error:
        raise UserError("land: lacks some of the field's points; give land on the field's grid") from error


def _by_lead(values: xr.DataArray) -> xr.DataArray:
    """Return values with a dimension `lead` in hours, without other dimensions of length one except quantile."""
    name = next((one for one in _LEAD if one in values.coords), None)
    if name is None:
        raise UserError(f"{values.name}: has no lead times; it needs a coordinate {' or '.join(_LEAD)}")
    if values[name].dtype.kind != "m":
        raise UserError(f"{name}: is {values[name].dtype}, not timedelta64; open the file with decode_timedelta=True")
    values = values if name in values.dims else values.expand_dims(name)
    more = [dim for dim in values.dims if dim not in (name, "quantile")]
    if several := [str(dim) for dim in more if values.sizes[dim] != 1]:
        raise UserError(f"{values.name}: has several values along {', '.join(several)}; choose one, as with isel")
    hours = values[name].values / np.timedelta64(1, "h")
    return values.squeeze(more).rename({name: "lead"}).assign_coords(lead=hours)


def _check_same(name: str, forecast: xr.DataArray, truth: xr.DataArray) -> None:
    """Refuse a truth that states another initialisation time, lead time or level than the forecast."""
    # A truth without them may have valid times of any origin, so only what both state can be wrong.
    for verb, at, axis in (("starts", "at", _START), ("has a lead", "of", _LEAD), ("is", "at level", ("level",))):
        stated = [one[spelt].values.ravel() for one in (forecast, truth) for spelt in axis if spelt in one.coords]
        if len(stated) != 2 or any(one.size != 1 for one in stated):
            continue
        ours, theirs = (_shown(one[0]) for one in stated)
        # A lead that is no timedelta is a number of hours, days or steps.
        if ours != theirs and len({one.dtype.kind == "m" for one in stated}) == 1:
            raise UserError(f"{name}: {verb} {at} {theirs}, the forecast {at} {ours}; choose the truth of that one")


def _check_units(name: str, truth: xr.DataArray, units: str) -> None:
    """Refuse a truth that states other units than those of the forecast."""
    stated = str(truth.attrs.get("units", ""))
    if stated and units and not same_units(stated, units):
        raise UserError(f"{name}: the truth is in {stated}, the forecast in {units}; bring the truth to {units}")


def _shown(value: Any) -> str:
    """Return a start to the minute, a lead time in hours or a level as text."""
    if isinstance(value, np.timedelta64):
        return f"{value / np.timedelta64(1, 'h'):g} h"
    return f"{value:g}" if isinstance(value, np.number) else str(value)[:16].replace(" ", "T")


def _at(values: xr.DataArray, latitude: float, longitude: float, level: int | None) -> xr.DataArray:
    """Return the values at the nearest grid point, for one level and one initialisation time.

    Values without latitude and longitude are those of the place.
    """
    from ensemble_ml.grid import canonical
    from ensemble_ml.inference.select import nearest_points

    if "level" in values.dims or (level is not None and "level" in values.coords):
        levels = np.atleast_1d(values["level"].values)
        if level is None or level not in levels:
            raise UserError(f"level={level}: give one of {', '.join(str(one) for one in levels)} hPa")
        values = values.sel(level=level) if "level" in values.dims else values
    for dim in _START:
        if values.sizes.get(dim, 1) != 1:
            name = values.name or "truth"
            raise UserError(f"{name}: holds {values.sizes[dim]} init times; choose one, as with isel({dim}=[0])")
        values = values.squeeze(dim, drop=True) if dim in values.dims else values
    on_grid = [axis for axis in ("latitude", "longitude") if axis in values.dims]
    if len(on_grid) == 1:
        raise UserError(f"{values.name}: has {on_grid[0]} alone of a grid's two axes; keep both, or choose a point")
    if not on_grid:
        return values
    _check_degrees(values)
    grid, rows, columns = canonical(values["latitude"].values, values["longitude"].values)
    nearest = nearest_points(grid, [[float(latitude), float(longitude)]])
    return values.isel(latitude=int(rows[nearest.rows[0]]), longitude=int(columns[nearest.columns[0]]))


def _title(field: xr.DataArray) -> str:
    """Return the long name of a field, its threshold, level or quantile, and its times."""
    words = [str(field.attrs.get("long_name", field.name))]
    for name, one in field.coords.items():
        word = str(name).partition("_")[0]
        if word in ("level", "quantile", "threshold") and one.size == 1 and one.dtype.kind in "iuf":
            units = {"level": "hPa", "quantile": ""}.get(word, str(one.attrs.get("units", "")))
            words.append(f"{word} {one.item():g} {units}".strip())
    for name in (*_START, *_LEAD):
        if name in field.coords and field[name].size == 1:
            value = field[name].values.ravel()[0]
            if name in _START:
                words.append(f"from {date_text(value) if isinstance(value, np.datetime64) else str(value)[:16]}")
            elif isinstance(value, np.timedelta64):
                words.append(f"+{value / np.timedelta64(1, 'h'):g} h")
            else:  # a number, as files hold it
                words.append(f"+{value} {field[name].attrs.get('units', '')}".strip())
    return ", ".join(words)


def _scale(field: xr.DataArray) -> str:
    """Return the label of the colour bar: the units, or the word probability."""
    units = str(field.attrs.get("units", ""))
    return "probability" if units == "1" and str(field.name).endswith("_prob_above") else units
