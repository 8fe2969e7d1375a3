"""Zarr stores whose arrays lie in groups: a list of the groups, and the coordinates that they share.

dynamical.org keeps fields at the surface in the root of a store and those on pressure levels in a group of it. Each
group is read like a store of its own. A dimension without a coordinate takes it from the groups above, as in xarray's
DataTree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import xarray as xr

from data_prep.cf_missing import open_zarr
from ensemble_ml.store.remote import is_remote, remote_groups, without_group

_MARKS = ("zarr.json", ".zgroup", ".zmetadata")


def is_zarr(path: str | os.PathLike) -> bool:
    """Return whether a folder is a Zarr group of version 2 or 3. An array of version 3 counts, too."""
    return any(os.path.isfile(os.path.join(path, mark)) for mark in _MARKS)


def groups_of(path: str) -> list[str]:
    """Return the paths of all groups below the root of a Zarr store, sorted.

    Behind a URL, only groups in the consolidated metadata of the root are found.

    Args:
        path: folder or URL of the store.

    Raises:
        UserError: a remote store cannot be read.
    """
    return remote_groups(path) if is_remote(path) else sorted(_groups_in(path))


def _groups_in(folder: str) -> Iterator[str]:
    """Yield all groups below a folder. Folders of arrays are not searched: they may hold millions of chunks."""
    for entry in os.scandir(folder):
        if entry.is_dir() and is_zarr(entry.path) and not _is_array(entry.path):
            yield entry.path
            yield from _groups_in(entry.path)


def _is_array(folder: str) -> bool:
    """Return whether a Zarr folder is an array of version 3, whose metadata file is named like that of a group."""
    try:
        with open(os.path.join(folder, "zarr.json"), encoding="utf-8") as file:
            return json.load(file).get("node_type") == "array"
    except (OSError, ValueError, AttributeError):
        return False


def with_shared_coordinates(data: xr.Dataset, path: str) -> xr.Dataset:
    """Return the Dataset of a group with coordinates of the groups above it for dimensions that have none.

    A coordinate of another length than the dimension is not taken.

    Args:
        data: the Dataset.
        path: folder or URL of its group.
    """
    above = without_group(path) if is_remote(path) else os.path.dirname(os.path.abspath(path))
    if above == path or not (is_remote(path) or is_zarr(above)) or data.sizes.keys() <= data.coords.keys():
        return data
    shared = with_shared_coordinates(open_zarr(above), above)
    lacking = [dim for dim in data.sizes if dim not in data.variables and dim in shared.coords]
    return data.assign_coords({dim: shared[dim] for dim in lacking if shared.sizes[dim] == data.sizes[dim]})
