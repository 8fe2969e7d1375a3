#!/usr/bin/env python3
"""Make ensemble_ml/verification/coasts.npz, the coasts that maps show where no land mask is given.

The source is Natural Earth at 1:110 million (naturalearthdata.com), which is in the public domain. The wheel of
geopandas 0.14.4 holds its countries, whose union is the land:

    pip download --no-deps geopandas==0.14.4 && scripts/coasts.py geopandas-0.14.4-py3-none-any.whl
"""

import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
from shapely import polygonize, union_all
from shapely.geometry import LinearRing

SHAPES = "geopandas/datasets/naturalearth_lowres/naturalearth_lowres.shp"
OUTPUT = Path(__file__).parents[1] / "ensemble_ml" / "verification" / "coasts.npz"
TOLERANCE, SMALLEST = 0.3, 3.0  # degrees and square degrees: what a world map of 600 pixels shows


def rings(data: bytes):
    """Yield the rings of a file of polygons, (N, 2) longitude and latitude in degrees.

    Source of the format: ESRI Shapefile Technical Description, 1998, shape type 5.
    """
    at = 100
    while at < len(data):
        length = 2 * struct.unpack(">i", data[at + 4 : at + 8])[0]
        parts, points = struct.unpack("<2i", data[at + 44 : at + 52])
        begins = np.frombuffer(data, "<i4", parts, at + 52)
        corners = np.frombuffer(data, "<f8", 2 * points, at + 52 + 4 * parts).reshape(-1, 2)
        yield from np.split(corners, begins[1:])
        at += 8 + length


def main(wheel: str) -> None:
    """Write the coasts as (N, 2) int16 longitudes and latitudes in tenths of a degree, each line ended by 32767."""
    shapes = rings(zipfile.ZipFile(wheel).read(SHAPES))
    # A buffer of a hundredth of a degree closes the gaps between neighbours, whose borders are no coasts.
    land = union_all([area.buffer(0.01) for ring in shapes for area in polygonize([LinearRing(ring)]).geoms])
    lines = []
    for area in (area for area in land.geoms if area.area > SMALLEST):
        for ring in (area.exterior, *(hole for hole in area.interiors if LinearRing(hole).convex_hull.area > SMALLEST)):
            points = np.array(ring.simplify(TOLERANCE).coords)
            # The cut at the date line and the South Pole belong to the map and are no coasts.
            cut = (np.abs(points[:, 0]) > 179.9) | (points[:, 1] < -89)
            for line in np.split(points, np.flatnonzero(cut)):
                line = line[1:] if len(line) and (np.abs(line[0, 0]) > 179.9 or line[0, 1] < -89) else line
                if len(line) > 1:
                    lines.append(np.vstack([np.round(line * 10), [[32767, 32767]]]))
    np.savez_compressed(OUTPUT, points=np.concatenate(lines).astype(np.int16))
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes, {len(lines)} lines, {sum(map(len, lines))} points")


if __name__ == "__main__":
    main(*sys.argv[1:])
