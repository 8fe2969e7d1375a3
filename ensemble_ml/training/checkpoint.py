"""Checkpoints: one folder for each step, whole or absent. Loading one runs no code from its files.

    checkpoints/step_00000400/model.safetensors       weights and buffers that predict (averaged, if that is on)
                              optimizer.safetensors   what a resumed run needs besides, as flat tensors
                              rank_00000.safetensors  state of one rank alone, such as its momentum under votes
                              checkpoint.json         format, step, config, spec, scores, versions, sha256 of the files
    checkpoints/last, checkpoints/best -> step_...

`training.keeper` writes them. Once there is a checkpoint, `last` leads to a whole one whenever a run dies. The run may
leave incomplete files, which the next start removes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ensemble_ml.config import Objective, Precision
from ensemble_ml.errors import UserError
from ensemble_ml.models import AnyModel, Climate, EnsembleModel, ModelSpec, build_model
from ensemble_ml.models.inputs import EnsembleInput, Prediction
from ensemble_ml.store.manifest import hash_file
from ensemble_ml.training.widths import widths_for

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

FORMAT = 6  # raised whenever a reader of the previous format would misread the files
MODEL, TRAINING, META, RANK = "model.safetensors", "optimizer.safetensors", "checkpoint.json", "rank_"
PARTIAL, STEP = ".partial-", "step_"
BEFORE = "b"  # ends the name of a checkpoint before the tournament that follows its step
TRAINER = "trainer_"  # the folders of the trainers of one run
CLOCK = "clock"  # entry of checkpoint.json for times
_NAMED = 8  # entries of a folder that a message lists at most


@dataclass(eq=False)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        path: its folder.
        spec: the model's spec.
        state_dict: weights and buffers of the model.
        training: tensors that a resumed run needs; empty unless asked for.
        meta: the contents of checkpoint.json.
    """

    path: Path
    spec: ModelSpec
    state_dict: dict[str, Tensor]
    training: dict[str, Tensor]
    meta: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Return a hash of the whole checkpoint: that of its JSON, which holds the hashes of the tensor files."""
        return self.meta["sha256"]

    @property
    def ranks(self) -> int:
        """Return how many ranks wrote tensors of their own."""
        return sum(name.startswith(RANK) for name in self.meta["files"])

    def of_rank(self, rank: int) -> dict[str, Tensor]:
        """Read and verify the tensors of one rank, by name.

        Raises:
            UserError: the file is absent or damaged.
        """
        return _read_tensors(self.path, self.path / rank_file(rank), self.meta)


def rank_file(rank: int) -> str:
    """Return the name of the file for the tensors of one rank."""
    return f"{RANK}{rank:05d}.safetensors"


def _readable(read: Callable[P, T]) -> Callable[P, T]:
    """Raise a UserError where storage refuses to give the checkpoint that is the first argument of a function."""

    @wraps(read)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except OSError as error:
            raise UserError(f"checkpoint {args[0]}: cannot be read ({error.strerror or error}); try again") from error

    return call


@_readable
def load_checkpoint(path: str | Path, *, training: bool = False) -> Checkpoint:
    """Read and verify a checkpoint folder, or a link to one; with `training` also what a resumed run needs.

    Raises:
        UserError: there is none, it is damaged, or it has another format.
    """
    path = Path(path)
    folder = path.resolve()  # a training that is still running may change the link at any moment
    try:
        return _load(path, folder, training)
    except (UserError, OSError):
        # The link was changed while the checkpoint was read, and its old folder may be gone: read the new one.
        if path.resolve() != folder:
            return _load(path, path.resolve(), training)
        raise


def _load(path: Path, folder: Path, training: bool) -> Checkpoint:
    """Read the checkpoint in `folder`, which messages call `path`."""
    meta = load_meta(path, folder)
    state_dict = _read_tensors(path, folder / MODEL, meta)
    extra = _read_tensors(path, folder / TRAINING, meta) if training else {}
    return Checkpoint(folder, _spec_of(path, meta), state_dict, extra, meta)


@_readable
def find_checkpoint(path: str | Path) -> Path:
    """Return the folder of a checkpoint, which may also be given by its run or by the run's folder of checkpoints.

    For a run, the best checkpoint is taken, and this is logged. A path that is no folder is returned as it is;
    `load_checkpoint` will refuse it.

    Raises:
        UserError: there is no best checkpoint (the message lists what the folder has), or it is damaged or has another
            format.
    """
    path = Path(path)
    if (path / META).is_file() or not path.is_dir():
        return path
    steps = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    best = steps / "best"
    if (best / META).is_file():
        log.info("checkpoint %s: takes its best, %s (step %d)", path, best, load_meta(best)["step"])
        return best
    others = sorted(entry.name for entry in steps.iterdir() if (entry / META).is_file())
    if others:
        chosen = "last" if "last" in others else others[-1]
        raise UserError(f"checkpoint {path}: has no best, only {', '.join(others)}; give {steps / chosen}")
    entries = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    holds = f"holds no checkpoint, but {', '.join(entries[:_NAMED])}{more}" if entries else "is empty"
    raise UserError(f"checkpoint {path}: {holds}; give a run like runs/NAME, or one like runs/NAME/checkpoints/last")


def load_spec(path: str | Path) -> ModelSpec:
    """Return the spec of a checkpoint's model, without reading its weights.

    Raises:
        UserError: the checkpoint is absent or damaged, or has another format.
    """
    return _spec_of(path, load_meta(path))


def _spec_of(path: str | Path, meta: Mapping[str, Any]) -> ModelSpec:
    """Return the spec in the JSON of a checkpoint; refuse one with settings that this version does not have, or lacks.

    Another version may have written such a checkpoint in the same format.
    """
    try:
        return ModelSpec.from_json(meta["spec"])
    except (KeyError, TypeError, ValueError) as error:  # a UserError is a ValueError
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(
            f"checkpoint {path}: this version cannot build its model ({why}); use the version that wrote it, or train"
            " it again"
        ) from error


@_readable
def load_meta(path: str | Path, folder: Path | None = None) -> dict[str, Any]:
    """Return the contents of a checkpoint's JSON, without reading its weights.

    Messages call the checkpoint `path`; it lies in `folder`, if that is given.

    Raises:
        UserError: the checkpoint is absent or damaged, or has another format.
    """
    folder = folder or Path(path)
    if not folder.exists():
        raise UserError(f"checkpoint {path}: no such folder; give one like runs/NAME/checkpoints/best or .../last")
    if not (folder / META).is_file():
        raise UserError(
            f"checkpoint {path}: holds no {META}; give a folder like runs/NAME/checkpoints/best or .../last"
        )
    try:
        meta = json.loads((folder / META).read_bytes())
        number = meta["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, META) from error
    if number != FORMAT:
        raise UserError(
            f"checkpoint {path}: format {number}; this version reads {FORMAT}; train it again, or use the version that"
            " wrote it"
        )
    # The hash guards against a file that was cut off or edited.
    if meta.get("sha256") != digest(meta):
        raise _damaged(path, META)
    return meta


def load_model(path: str | Path) -> tuple[AnyModel, dict[str, Any]]:
    """Return the model of a checkpoint, ready to predict, and the contents of the checkpoint's JSON.

    The model multiplies its scales by the calibration factors of the validation (`training.validation`), if there are
    any. A warning is logged if these belong to the weights of another step of the run: a checkpoint that a signal or
    the clock asked for is not validated.

    Raises:
        UserError: the checkpoint is absent or damaged, or has another format.
    """
    checkpoint = load_checkpoint(path)
    model = build_model(checkpoint.spec, Climate.default(checkpoint.spec))
    if checkpoint.meta.get("precision", {}).get("precision") == Precision.float64.value:
        model.double()  # before the weights are loaded, which would lose their last bits in float32
    load_weights(model, checkpoint)
    if isinstance(model, EnsembleModel):
        model.settle()
    _tell_of_other_step(path, checkpoint.meta)
    if predicts_members(checkpoint.meta):
        text = "checkpoint %s: trained by objective=members: its distribution is that of another member, and its sigma"
        log.warning(f"{text} lacks the error of the model; train on with objective=truth init_from=...", path)
    if checkpoint.meta.get("widths") is not None:
        model.register_forward_hook(_widening(checkpoint))
    return model.eval(), checkpoint.meta


def predicts_members(meta: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint with this checkpoint.json was trained on members that stood for the truth."""
    return bool(meta.get("config", {}).get("objective") == Objective.members.value)


def _widening(checkpoint: Checkpoint) -> Callable[[AnyModel, tuple[EnsembleInput], Prediction], Prediction]:
    """Return a hook that applies the calibration factors for the number of members to a prediction."""
    usual, by_size = torch.tensor(checkpoint.meta["widths"]), checkpoint.meta.get("widths_by_size")
    families = checkpoint.spec.families  # a closure over `checkpoint` would keep its tensors in memory

    def widen(_: AnyModel, given: tuple[EnsembleInput], prediction: Prediction) -> Prediction:
        widths = usual.to(given[0].count.device)
        if by_size:
            widths = widths * widths_for(given[0].count, by_size)
        return prediction.widened(widths, families)

    return widen


def _tell_of_other_step(path: str | Path, meta: Mapping[str, Any]) -> None:
    """Warn if factors and scores belong to the weights of another step of the run.

    Nothing is known of older checkpoints, or before the first validation of a run that began with `init_from`.
    """
    validated = meta.get("validated_step")
    if validated is not None and validated != meta["step"]:
        log.warning(
            "checkpoint %s: of step %d, but its calibration factors and scores are of the validation after step %d;"
            " checkpoints/best has its own",
            path, meta["step"], validated,
        )  # fmt: skip


def load_weights(model: torch.nn.Module, checkpoint: Checkpoint, *, climate: bool = True) -> None:
    """Load the weights and buffers of a checkpoint into a model.

    Without `climate` the model keeps its own buffers where fits give them (`fitted_buffers`).

    Raises:
        UserError: names or shapes differ.
    """
    weights = dict(checkpoint.state_dict)
    # Names and shapes are compared here, because torch's own message would list all of them.
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in weights.items()}
    differ = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    if differ:
        there, here = found.get(differ[0], "absent"), wanted.get(differ[0], "absent")
        raise UserError(
            f"checkpoint {checkpoint.path}: its layout differs from the model's in {len(differ)} tensors, first"
            f" {differ[0]}: {there} there, {here} here; use the same model and data settings"
        )
    if not climate:
        weights |= {name: values for name, values in fitted_buffers(model) if name in weights}
    model.load_state_dict(weights)


def fitted_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and buffers of what fits give, so not those of batch norms, which training changes."""
    for prefix, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            yield from module.named_buffers(prefix, recurse=False)


def point(folder: Path, link: str, target: str) -> None:
    """Make `folder/link` lead to the checkpoint named `target`, without a moment at which there is no link."""
    if is_target(folder, target, (link,)):
        return
    # A symbolic link cannot be changed in one step, but a rename replaces it at once.
    temporary = folder / f"{PARTIAL}{link}"
    temporary.unlink(missing_ok=True)
    os.symlink(target, temporary)
    os.replace(temporary, folder / link)
    sync(folder)


def step_of(link: Path) -> float | None:
    """Return the step, by `_number`, of the checkpoint that a link leads to; None if there is none or it is no link."""
    try:
        return _number(Path(os.readlink(link))) if (link / META).is_file() else None
    except (OSError, ValueError):  # no link, or a folder in its place, as in a copy without links
        return None


def newest_step(folder: Path) -> float | None:
    """Return the step of `last`, or of the newest checkpoint if a copy has lost its links; None if there is none.

    Return infinity if only folders in the place of links are there: their names do not tell their steps. Another rank
    may mend links now.
    """
    # A folder in the place of a link may become that of a step at any moment, so it is looked for first.
    copied = any((folder / link).is_dir() for link in ("last", "best"))
    step = step_of(folder / "last")
    if step is None and (steps := _steps(folder)):
        return _number(steps[0])
    return math.inf if step is None and copied else step


def mend_links(folder: Path) -> None:
    """Make `last` and `best` links again, if a run was copied with folders in their place or without them.

    Call this before `clean`, which removes checkpoints that no link leads to. It may be killed at any moment and called
    again. If there is no `last`, the newest whole checkpoint becomes it.

    Raises:
        UserError: such a folder is damaged, or differs from the checkpoint of the same step beside it.
    """
    for link in ("last", "best"):
        copy, aside = folder / link, folder / f"{PARTIAL}copy-{link}"
        if copy.is_symlink() or not copy.is_dir():
            continue
        # A tool that follows links leaves two folders in the place of one folder and a link to it. Three cases follow:
        # both are equal, so the copy is moved aside; the step's own folder is missing; or it is damaged and the copy is
        # whole.
        meta = load_meta(copy)
        step = folder / step_name(meta["step"], meta.get("before", False))
        # An earlier attempt that was killed may have left this folder.
        shutil.rmtree(aside, ignore_errors=True)
        if _whole(step) and (step / META).read_bytes() == (copy / META).read_bytes():
            os.rename(copy, aside)
        elif not step.exists():
            os.rename(copy, step)
        elif _whole(copy) and not _whole(step):
            os.rename(step, aside)
            os.rename(copy, step)
        else:
            raise UserError(
                f"checkpoint {copy}: differs from {step.name} beside it; remove the one that is not the run's"
            )
        point(folder, link, step.name)
        log.info("checkpoint %s: was a folder, as a copy without links leaves it; leads to %s again", copy, step.name)
    steps = [] if (folder / "last").exists() else _steps(folder)
    # `_whole` hashes all files of a checkpoint, so it is asked only until one is good.
    newest = next(filter(_whole, steps), None)
    if newest is not None:
        point(folder, "last", newest.name)
        log.warning("checkpoint %s: is not there; %s is the newest that is whole", folder / "last", newest.name)


def refuse_unread(folder: Path) -> None:
    """Refuse to start anew in a folder whose checkpoints cannot be read. Call this if there is no `last`.

    Raises:
        UserError: there are checkpoints; the message names the newest, and why it cannot be read.
    """
    steps = _steps(folder)
    if not steps:
        return
    try:
        load_meta(steps[0])
        why = f"checkpoint {steps[0]}: some of its files are not as they were written"
    except UserError as error:
        why = str(error)
    raise UserError(
        f"resume: {folder} holds {len(steps)} steps, and none that can be gone on from ({why}); move it away to begin"
        " anew"
    )


def _is_step(entry: Path) -> bool:
    """Return True for the folder of a step; False for a copy that somebody keeps, such as step_00000400_good."""
    return re.fullmatch(rf"{STEP}\d+{BEFORE}?", entry.name) is not None


def step_name(step: int, before: bool = False) -> str:
    """Return the name of a checkpoint's folder; `before` is true of one before the tournament that follows its step."""
    return f"{STEP}{step:08d}{BEFORE if before else ''}"


def _number(entry: Path) -> float:
    """Return the step in the name of a folder. A checkpoint before the tournament of its step counts half a step less.

    Raises:
        ValueError: the name is not that of a step.
    """
    name = entry.name.removeprefix(STEP)
    return int(name.removesuffix(BEFORE)) - 0.5 * name.endswith(BEFORE)


def _steps(folder: Path) -> list[Path]:
    """Return the folders of all steps, newest first."""
    return sorted(filter(_is_step, folder.glob(f"{STEP}*")), key=_number, reverse=True)


def clean(folder: Path) -> None:
    """Remove what a killed run left half-written, and checkpoints that no link leads to."""
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.name.startswith(PARTIAL) or (_is_step(entry) and not is_target(folder, entry.name)):
            if entry.is_symlink() or entry.is_file():
                entry.unlink()
            else:
                shutil.rmtree(entry)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU, which share no memory with them."""
    return {name: torch.empty_like(t, device="cpu").copy_(t.detach()) for name, t in tensors.items()}


def is_target(folder: Path, name: str, links: Sequence[str] = ("last", "best")) -> bool:
    """Return True if one of the links leads to the checkpoint's folder of this name."""
    return any((folder / link).is_symlink() and os.readlink(folder / link) == name for link in links)


def _whole(path: Path) -> bool:
    """Return True if all files of a checkpoint are as they were written."""
    try:
        files = load_meta(path)["files"]
    except UserError as error:
        if isinstance(error.__cause__, OSError):  # it may be whole
            raise
        return False
    return all((path / name).is_file() and hash_file(path / name) == found for name, found in files.items())


def _read_tensors(path: Path, file: Path, meta: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a file, copied; refuse a file that is absent or damaged."""
    if not file.is_file():
        raise UserError(f"checkpoint {path}: {file.name} is absent; use another checkpoint")
    if hash_file(file) != meta["files"].get(file.name):
        raise _damaged(path, file.name)
    try:
        # The tensors are copied out of the memory mapping. Otherwise the file would stay open as long as a tensor
        # lives: on NFS its folder could not be removed, and elsewhere its space would not be freed.
        return {name: tensor.clone() for name, tensor in load_file(str(file)).items()}
    except SafetensorError as error:
        raise _damaged(path, file.name) from error


def _damaged(path: str | Path, name: str) -> UserError:
    """Return the error for a file that is not as it was written."""
    return UserError(f"checkpoint {path}: {name} is damaged (it is not what was written); use another checkpoint")


def digest(meta: Mapping[str, Any]) -> str:
    """Return the sha256 of a checkpoint's JSON, without the entry for this hash and the entry for times (`CLOCK`).

    So a run that is repeated, or killed and resumed, has the same hash.
    """
    plain = {k: v for k, v in meta.items() if k not in ("sha256", CLOCK)}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's entries, is on disk."""
    # Without this, a power failure after the rename could leave a folder whose files are empty.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
