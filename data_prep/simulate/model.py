"""The atmosphere model of the embedded archive: jcm's SPEEDY physics on the dinosaur spectral core.

Two models are built in the same way. A run of the *nature* model is the truth. The *forecast* model differs from it by
`archive.MODEL_ERROR` (and, for some sizes, by its truncation), so that forecasts have systematic errors.

A state is one float32 array of spectral coefficients with axes KML. K are planes: vorticity, divergence, temperature
and humidity on Z sigma levels, then the logarithm of surface pressure over p0. M are the zonal wavenumbers 0, 1, -1, 2,
-2, ..., and L the total wavenumbers. The basis is orthonormal on the unit sphere. Land and sea temperatures are
prescribed. SPEEDY computes all else that it needs anew at 0 UTC, so the array is the whole state of a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
from dinosaur.primitive_equations import State, truncated_modal_orography
from jax_datetime import Datetime, Timedelta
from jcm import constants
from jcm.date import DateData
from jcm.diffusion import DiffusionFilter
from jcm.dycore.dinosaur.dycore import DinosaurDycore
from jcm.forcing import ForcingData
from jcm.model import Model
from jcm.physics.speedy.params import Parameters
from jcm.physics.speedy.speedy_coords import get_speedy_coords
from jcm.physics.speedy.speedy_terms import speedy_physics
from jcm.physics_interface import compute_physics_step_gridpoint
from jcm.terrain import TerrainData

from data_prep.simulate.archive import MODEL_ERROR
from data_prep.simulate.synthesis import SIGMA, ModelFacts

BATCH = 4  # states stepped together by vmap; a larger batch exceeds a core's cache and takes longer for each state
_DAY = 86400  # seconds
_DIFFUSION_HOURS = {"div": 2.0, "vor_q": 12.0, "temp": 24.0}  # jcm's defaults, for the smallest wave of T31
_DIFFUSION_ORDER = {"div": 1, "vor_q": 2, "temp": 2}


@dataclass(frozen=True)
class Recipe:
    """The settings of a model: its `truncation`, its time step, and whether `MODEL_ERROR` applies.

    A day has to be a multiple of the time step, which is given in `minutes`.
    """

    truncation: int
    minutes: int
    wrong: bool = False


class Atmosphere:
    """A model that advances states by one day a call. The first call with a new number of states compiles it."""

    def __init__(self, recipe: Recipe):
        """Load boundary conditions from jcm's wheel and build the model of `recipe`."""
        self.recipe = recipe
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # xarray's, from inside jcm
            self._coords = get_speedy_coords(layers=len(SIGMA), spectral_truncation=recipe.truncation)
            bounds = resources.files("jcm.data.bc") / "t30" / "clim"
            self._forcing = ForcingData.from_file(str(bounds / "forcing.nc"), coords=self._coords)
            self._terrain = _terrain(self._coords, str(bounds / "terrain.nc"))
        seconds = recipe.minutes * 60.0
        dycore = DinosaurDycore(self._coords, self._terrain, seconds, diffusion=_diffusion(recipe.truncation))
        physics = speedy_physics(_parameters(recipe.wrong), checkpoint_terms=False)
        self._model = Model(dycore, time_step=recipe.minutes, physics=physics)
        self._carry = self._model.initial_physics_carry()
        self._programs: dict[tuple[int, int], Callable] = {}  # batches and states in each -> compiled function

    @cached_property
    def facts(self) -> ModelFacts:
        """Return the constants that synthesis on another grid needs."""
        grid, dycore = self._coords.horizontal, self._model.dycore
        return ModelFacts(
            truncation=self.recipe.truncation,
            reference_temperature=np.asarray(dycore.primitive.reference_temperature, np.float64),
            orography_ml=np.asarray(dycore.primitive.orography, np.float64),
            land_yx=np.asarray(self._terrain.fmask, np.float64).T,
            latitude=np.rad2deg(np.asarray(grid.latitudes, np.float64)),
            longitude=np.rad2deg(np.asarray(grid.longitudes, np.float64)),
            gas_constant=float(constants.rd),
            vapour_constant=float(constants.rv),
            gravity=float(constants.grav),
            reference_pressure=float(constants.p0),
            radius=float(constants.rearth),
        )

    def rest(self, seed: int) -> np.ndarray:
        """Return the first state of a nature run, KML: isothermal, at rest, with small random changes of pressure."""
        return np.asarray(_pack(self._model.initial_state(random_seed=seed)), np.float32)

    def advance(self, x_nkml: np.ndarray, day: int) -> tuple[np.ndarray, np.ndarray]:
        """Advance N states by one day.

        Args:
            x_nkml: states at 0 UTC.
            day: days since 1970-01-01, for sun, sea and snow.

        Returns:
            The states one day later, and the precipitation of the day in metres: (N, Gaussian latitude, longitude).

        Raises:
            FloatingPointError: a state is no longer finite.
        """
        n = len(x_nkml)
        batches, batch = _batches(n)
        # A compiled function has fixed shapes, so the last batch is filled up with copies of the first state.
        padded = batches * batch
        x = np.concatenate([x_nkml, np.repeat(x_nkml[:1], padded - n, axis=0)]) if padded > n else x_nkml
        x, rain = self.compiled(n)(jnp.asarray(x).reshape(batches, batch, *x.shape[1:]), jnp.int32(day))
        x, rain = np.asarray(x).reshape(padded, *x.shape[2:])[:n], np.asarray(rain).reshape(padded, *rain.shape[2:])[:n]
        if not np.isfinite(x).all():
            raise FloatingPointError(
                f"the T{self.recipe.truncation} model blew up after day {day}; shorten its time step"
            )
        return x, np.swapaxes(rain, -1, -2)

    def compiled(self, n: int) -> Callable:
        """Return the function that advances N states by one day, in batches. The first call compiles it."""
        batches, batch = _batches(n)
        if (batches, batch) not in self._programs:
            planes = 4 * len(SIGMA) + 1
            states = jax.ShapeDtypeStruct((batches, batch, planes, *self._coords.horizontal.modal_shape), jnp.float32)
            advance = jax.jit(lambda x, day: jax.lax.map(lambda one: self._one_day(one, day), x))
            self._programs[batches, batch] = advance.lower(states, jax.ShapeDtypeStruct((), jnp.int32)).compile()
        return self._programs[batches, batch]

    def _one_day(self, x_nkml, day):
        """Advance one batch by a day.

        Values that are the same for all members are not batched. One of them is the step counter, which decides whether
        SPEEDY's radiation is due (every third step). If it were batched, vmap would compute radiation at each step.
        """
        axes = jax.tree.map(_member_axis, self._carry)
        state_axes = jax.tree.map(lambda _: 0, _unpack(x_nkml[0]))
        step = jax.vmap(self._step, (state_axes, axes, None), (state_axes, axes, 0))
        carry = jax.tree.map(
            lambda leaf: leaf if _member_axis(leaf) is None else jnp.stack([leaf] * len(x_nkml)), self._carry
        )

        def body(state_carry, index):
            seconds = index * (self.recipe.minutes * 60)
            date = DateData.set_date(Datetime(Timedelta(days=day, seconds=seconds)))
            state, carry, rain = step(*state_carry, self._forcing.select(date))  # type: ignore[call-arg]
            return (state, carry), rain

        start = (jax.vmap(_unpack)(x_nkml), carry)
        (state, _), rain = jax.lax.scan(body, start, jnp.arange(_DAY // (self.recipe.minutes * 60)))
        return jax.vmap(_pack)(state), rain.sum(0)

    def _step(self, state, carry, forcing):
        """Advance one state by a time step. Also return the physics' carry and the precipitation in m."""
        seconds = self.recipe.minutes * 60.0
        grid = self._model.dycore.to_physics_state(state)
        tendency, carry = compute_physics_step_gridpoint(
            grid, forcing, self._terrain, carry, physics=self._model.physics, time_step=seconds
        )
        rain = carry["surface_exchange"].precipitation * (seconds / 1000.0)  # kg m-2 s-1 to metres of water
        return self._model.dycore.step(state, tendency), carry, rain


def _batches(n: int) -> tuple[int, int]:
    """Return the number of batches in which N states are advanced, and the number of states in each."""
    return (1, 1) if n == 1 else (-(-n // BATCH), BATCH)


def _terrain(coords, path: str) -> TerrainData:
    """Return the terrain on the model's grid.

    Every model has the orography of T31, truncated if the model is coarser, and not interpolated. So the surface
    pressure of one model fits the ground of another. At T63 the ground is as smooth as at T31: jcm has nothing finer.
    """
    fine = get_speedy_coords(layers=len(SIGMA), spectral_truncation=31)
    source = TerrainData.from_file(path, coords=fine)
    terrain = TerrainData.from_file(path, coords=coords)
    modal = truncated_modal_orography(source.orog, fine, wavenumbers_to_clip=2)
    rows, columns = coords.horizontal.modal_shape
    beyond = [(0, max(0, wanted - given)) for wanted, given in zip((rows, columns), modal.shape, strict=True)]
    own = jnp.pad(modal, beyond)[:rows, :columns].at[:, columns - 1 :].set(0)
    ground = coords.horizontal.to_nodal(own)
    return TerrainData.from_coords(coords, orography=ground, fmask=terrain.fmask, lfluxland=True)


def _parameters(wrong: bool) -> Parameters:
    """Return SPEEDY's parameters, changed by `MODEL_ERROR` if the model is to be wrong."""
    parameters = Parameters.default()
    for group, changes in (MODEL_ERROR if wrong else {}).items():
        for name, value in changes.items():
            setattr(getattr(parameters, group), name, jnp.array(value))
    return parameters


def _diffusion(truncation: int) -> DiffusionFilter:
    """Return a hyperdiffusion that damps a wave of given length equally at every truncation.

    jcm's times are those of total wavenumber n = 31; damping grows with (n (n + 1))^order.
    """
    ratio = (31 * 32) / (truncation * (truncation + 1))
    times = {
        f"{name}_timescale": hours * 3600 * ratio ** _DIFFUSION_ORDER[name] for name, hours in _DIFFUSION_HOURS.items()
    }
    return DiffusionFilter(**times, **{f"{name}_order": order for name, order in _DIFFUSION_ORDER.items()})


def _member_axis(leaf) -> int | None:
    """Return the axis of members in a leaf of the physics' carry; None for the step counter and other scalars."""
    return None if jnp.ndim(leaf) == 0 else 0


def _pack(state: State) -> jax.Array:
    """Return a state as one array of planes, KML."""
    planes = (state.vorticity, state.divergence, state.temperature_variation, state.tracers["specific_humidity"])
    return jnp.concatenate([*planes, state.log_surface_pressure], axis=-3)


def _unpack(x_kml: jax.Array) -> State:
    """Return the state that an array of planes holds."""
    z = len(SIGMA)
    vorticity, divergence, temperature, humidity = (x_kml[k * z : (k + 1) * z] for k in range(4))
    return State(
        vorticity,
        divergence,
        temperature,
        x_kml[4 * z :],
        tracers={"specific_humidity": humidity},
        sim_time=jnp.zeros(()),
    )
