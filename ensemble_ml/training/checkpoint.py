"""Checkpoints: a folder a step, whole or not there at all, loaded without running anything from the file.

    checkpoints/step_00000400/model.safetensors       weights and buffers that predict (averaged, where that is on)
                              optimizer.safetensors   what else a resumed run needs, as flat tensors
                              rank_00000.safetensors  what that rank holds apart: its momentum under votes, and the like
                              checkpoint.json         format, step, config, spec, scores, versions, sha256 of the files
    checkpoints/last, checkpoints/best -> step_...

`keeper` writes them. A run that dies at any moment leaves `last` at a whole checkpoint, and at most rubbish that the
next start clears away.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ensemble_ml.config import Precision
from ensemble_ml.errors import UserError
from ensemble_ml.models import AnyModel, Climate, ModelSpec, build_model
from ensemble_ml.models.heads import Heads
from ensemble_ml.models.inputs import EnsembleInput, Prediction
from ensemble_ml.models.rivals.emos_model import EmosModel
from ensemble_ml.store.manifest import hash_file
from ensemble_ml.training.widths import widths_for

log = logging.getLogger(__name__)

FORMAT = 5  # raised whenever a reader of the older number would misread the files
MODEL, TRAINING, META, RANK = "model.safetensors", "optimizer.safetensors", "checkpoint.json", "rank_"
PARTIAL, STEP = ".partial-", "step_"
_NAMED = 8  # entries of a folder in a message


@dataclass(eq=False)
class Checkpoint:
    """A checkpoint in memory: the model's `state_dict`, `training` tensors (empty unless asked for), `meta` as JSON."""

    path: Path
    spec: ModelSpec
    state_dict: dict[str, Tensor]
    training: dict[str, Tensor]
    meta: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Hash of the whole checkpoint: of its JSON, which holds the hashes of the tensor files."""
        return self.meta["sha256"]

    @property
    def ranks(self) -> int:
        """How many ranks kept tensors of their own."""
        return sum(name.startswith(RANK) for name in self.meta["files"])

    def of_rank(self, rank: int) -> dict[str, Tensor]:
        """Read and verify what one rank held apart.

        Raises:
            UserError: its file is absent or damaged.
        """
        return _read_tensors(self.path, self.path / rank_file(rank), self.meta)


def rank_file(rank: int) -> str:
    """Name of the file of what one rank holds apart."""
    return f"{RANK}{rank:05d}.safetensors"


def load_checkpoint(path: str | Path, *, training: bool = False) -> Checkpoint:
    """Read and verify a checkpoint folder (or a link to one).

    Args:
        path: e.g. runs/NAME/checkpoints/best.
        training: also read what a resumed run needs.

    Raises:
        UserError: there is none, it is damaged, or it is of another format.
    """
    path = Path(path)
    folder = path.resolve()  # a training that goes on may let the link point elsewhere at any moment
    try:
        return _load(path, folder, training)
    except (UserError, OSError) as error:
        if path.resolve() != folder:
            return _load(path, path.resolve(), training)
        if isinstance(error, UserError):
            raise
        raise UserError(f"checkpoint {path}: cannot be read ({error.strerror or error}); try again") from error


def _load(path: Path, folder: Path, training: bool) -> Checkpoint:
    meta = _read_meta(path, folder)
    state_dict = _read_tensors(path, folder / MODEL, meta)
    extra = _read_tensors(path, folder / TRAINING, meta) if training else {}
    return Checkpoint(folder, ModelSpec.from_json(meta["spec"]), state_dict, extra, meta)


def find_checkpoint(path: str | Path) -> Path:
    """Return the folder of a checkpoint, which may be given by its run or by the run's folder of checkpoints.

    Of these the best checkpoint is taken, and the log says so. A path of no folder is returned as it is, for
    `load_checkpoint` to refuse.

    Raises:
        UserError: there is no best checkpoint; the message names what is there.
    """
    path = Path(path)
    if (path / META).is_file() or not path.is_dir():
        return path
    steps = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    best = steps / "best"
    if (best / META).is_file():
        log.info("checkpoint %s: takes its best, %s (step %d)", path, best, _read_meta(best)["step"])
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
    """Return what a checkpoint's model takes and predicts, without reading its weights.

    Raises:
        UserError: as `load_checkpoint`.
    """
    return ModelSpec.from_json(load_meta(path)["spec"])


def load_meta(path: str | Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself, without reading its weights.

    Raises:
        UserError: as `load_checkpoint`.
    """
    return _read_meta(Path(path))


def load_model(path: str | Path) -> tuple[AnyModel, dict[str, Any]]:
    """Return the model of a checkpoint, ready to predict, and the checkpoint's `meta`.

    What it predicts is calibrated by the widths that the validation dates gave (`validation`), where there were any.
    Warns where these are of another step's weights: a checkpoint that a signal or the clock asks for is not validated.

    Raises:
        UserError: as `load_checkpoint`.
    """
    checkpoint = load_checkpoint(path)
    model = build_model(checkpoint.spec, Climate.default(checkpoint.spec))
    if checkpoint.meta.get("precision", {}).get("precision") == Precision.float64.value:
        model.double()  # before its weights come, which would lose their last bits
    load_weights(model, checkpoint)
    _tell_of_other_step(path, checkpoint.meta)
    if checkpoint.meta.get("widths") is not None:
        model.register_forward_hook(_widening(checkpoint))
    return model.eval(), checkpoint.meta


def _widening(checkpoint: Checkpoint) -> Callable[[AnyModel, tuple[EnsembleInput], Prediction], Prediction]:
    """A hook that gives predictions their widths, by the number of members."""
    usual, by_size = torch.tensor(checkpoint.meta["widths"]), checkpoint.meta.get("widths_by_size")
    families = checkpoint.spec.families  # not the checkpoint, whose tensors would live as long as the model

    def widen(_: AnyModel, given: tuple[EnsembleInput], prediction: Prediction) -> Prediction:
        widths = usual.to(given[0].count.device)
        if by_size:
            widths = widths * widths_for(given[0].count, by_size)
        return prediction.widened(widths, families)

    return widen


def _tell_of_other_step(path: str | Path, meta: Mapping[str, Any]) -> None:
    """Warn where widths and scores are not of the checkpoint's own weights; older checkpoints do not say."""
    validated = meta.get("validated_step")
    if validated is not None and validated != meta["step"]:
        log.warning(
            "checkpoint %s: of step %d, but its widths and scores are of the validation after step %d;"
            " checkpoints/best has its own",
            path, meta["step"], validated,
        )  # fmt: skip


def load_weights(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Put the weights and buffers of `checkpoint` into `model`.

    Raises:
        UserError: names or shapes differ.
    """
    weights = dict(checkpoint.state_dict)
    for module_name, module in model.named_modules():
        if isinstance(module, Heads):  # of a checkpoint from before there were such
            for name, values in module.dry_of_older().items():
                if weights.setdefault(f"{module_name}.{name}", values) is values:
                    log.debug("checkpoint %s: knows no %s; forecasts of no rain stay sure", checkpoint.path, name)
        if isinstance(module, EmosModel):
            weights.setdefault(".".join(filter(None, (module_name, "sizes"))), module.sizes)
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in weights.items()}
    differ = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    if differ:
        there, here = found.get(differ[0], "absent"), wanted.get(differ[0], "absent")
        raise UserError(
            f"checkpoint {checkpoint.path}: its layout differs from the model's in {len(differ)} tensors, first"
            f" {differ[0]}: {there} there, {here} here; use the same model and data settings"
        )
    model.load_state_dict(weights)


def point(folder: Path, link: str, target: str) -> None:
    """Let `folder/link` lead to `target` from one moment to the next."""
    if (folder / link).is_symlink() and os.readlink(folder / link) == target:
        return
    temporary = folder / f"{PARTIAL}{link}"
    temporary.unlink(missing_ok=True)
    os.symlink(target, temporary)
    os.replace(temporary, folder / link)
    sync(folder)


def mend_links(folder: Path) -> None:
    """Let `last` and `best` be links again where a run was copied with folders in their place, or without them.

    To be called before `clean`, which takes away what no link leads to. Killed at any moment, it can be called again:
    the newest whole step is `last` where there is none.

    Raises:
        UserError: such a folder is not what is there as the same step.
    """
    for link in ("last", "best"):
        copy, aside = folder / link, folder / f"{PARTIAL}copy-{link}"
        if copy.is_symlink() or not copy.is_dir():
            continue
        step = folder / f"{STEP}{_read_meta(copy)['step']:08d}"
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
    newest = next(filter(_whole, steps), None)
    if newest is not None:
        point(folder, "last", newest.name)
        log.warning("checkpoint %s: is not there; %s is the newest that is whole", folder / "last", newest.name)


def refuse_unread(folder: Path) -> None:
    """Refuse to begin anew over steps of which none can be read; to be called where nothing is `last`.

    Raises:
        UserError: there are steps; names the newest, and why it cannot be read.
    """
    steps = _steps(folder)
    if not steps:
        return
    try:
        _read_meta(steps[0])
        why = f"checkpoint {steps[0]}: some of its files are not as they were written"
    except UserError as error:
        why = str(error)
    raise UserError(
        f"resume: {folder} holds {len(steps)} steps, and none that can be gone on from ({why}); move it away to begin"
        " anew"
    )


def _is_step(entry: Path) -> bool:
    """Whether it is a step's own folder, and not a copy that somebody keeps (step_00000400_good)."""
    return re.fullmatch(rf"{STEP}\d+", entry.name) is not None


def _steps(folder: Path) -> list[Path]:
    """Folders of steps, the newest first."""
    return sorted(filter(_is_step, folder.glob(f"{STEP}*")), reverse=True)


def clean(folder: Path) -> None:
    """Remove what a killed run left half-written, and checkpoints that no link leads to."""
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.name.startswith(PARTIAL) or (_is_step(entry) and not is_target(folder, entry.name)):
            if entry.is_symlink() or entry.is_file():
                entry.unlink()
            else:
                shutil.rmtree(entry)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values on the CPU, in memory of their own."""
    return {name: torch.empty_like(t, device="cpu").copy_(t.detach()) for name, t in tensors.items()}


def is_target(folder: Path, name: str) -> bool:
    """Whether `last` or `best` leads to this entry."""
    return any((folder / link).is_symlink() and os.readlink(folder / link) == name for link in ("last", "best"))


def _whole(path: Path) -> bool:
    """Whether all files of a checkpoint are what was written."""
    try:
        files = _read_meta(path)["files"]
    except UserError:
        return False
    return all((path / name).is_file() and hash_file(path / name) == found for name, found in files.items())


def _read_meta(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """What the checkpoint in `folder`, which messages name as `path`, says of itself."""
    folder = folder or path
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
            f"checkpoint {path}: format {number}; this version reads {FORMAT}; use the version that wrote it"
        )
    if meta.get("sha256") != digest(meta):
        raise _damaged(path, META)
    return meta


def _read_tensors(path: Path, file: Path, meta: dict[str, Any]) -> dict[str, Tensor]:
    if not file.is_file():
        raise UserError(f"checkpoint {path}: {file.name} is absent; use another checkpoint")
    if hash_file(file) != meta["files"].get(file.name):
        raise _damaged(path, file.name)
    try:
        # Copied out of the mapping, or the file would stay open as long as a tensor lives: on NFS its folder could
        # not be removed, and elsewhere its space not be freed.
        return {name: tensor.clone() for name, tensor in load_file(str(file)).items()}
    except SafetensorError as error:
        raise _damaged(path, file.name) from error


def _damaged(path: Path, name: str) -> UserError:
    return UserError(f"checkpoint {path}: {name} is damaged (it is not what was written); use another checkpoint")


def digest(meta: Mapping[str, Any]) -> str:
    """Hash of what a checkpoint's JSON says, itself left out."""
    plain = {k: v for k, v in meta.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
