#!/usr/bin/env bash
# The main job on the embedded archive: simulate an ensemble, train on it, forecast from 5 of its 10 members, score.
# Does all its own set-up. Leaves runs/quickstart/{forecast/*.nc, scores.json, report.html}; run again, it goes on where
# it stopped.
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."
. scripts/environment.sh simulate,tracking
run=runs/quickstart
data=runs/quickstart-data
started=$(date +%s)
say() { printf '\n== %s (%d s)\n' "$1" $(($(date +%s) - started)); }

say "1/6 simulate: a ten-member ensemble and its truth, as GRIB"
ensemble-ml simulate simulate=quickstart output=$data/archive
say "2/6 prepare: the archive as a tensor store"
[ -d $data/store.zarr ] || ensemble-ml prepare input=$data/archive/ensemble truth=$data/archive/truth \
  static=$data/archive/static.grib output=$data/store.zarr
say "3/6 train: spread and post-processing"
resume=false
[ -e $run/checkpoints/last ] && resume=true
ensemble-ml train experiment=quickstart data.store=$data/store.zarr resume=$resume
say "4/6 fit: EMOS, the best of the statistical baselines, on the same dates and members"
resume=false
[ -e $run-emos/checkpoints/last ] && resume=true
ensemble-ml train experiment=quickstart model=emos run=quickstart-emos 'data.members=[5]' data.store=$data/store.zarr \
  resume=$resume
say "5/6 predict: the test dates, from five members"
ensemble-ml predict checkpoint=$run/checkpoints/best input=$data/archive/ensemble members_in=5 'dates=["2003"]' \
  output=$run/forecast overwrite=true
ensemble-ml predict checkpoint=$run-emos/checkpoints/best input=$data/archive/ensemble members_in=5 'dates=["2003"]' \
  output=$run/emos overwrite=true
# An archive that was simulated before lacks the forecast model's orography; raw fields are then not corrected for height.
ground=()
[ -e $data/archive/forecast_static.grib ] &&
  ground=(orography=$data/archive/forecast_static.grib truth_orography=$data/archive/static.grib)
say "6/6 evaluate: beside the raw ensemble and statistical baselines"
ensemble-ml evaluate forecast=$run/forecast baselines=$run/emos ensemble=$data/store.zarr truth=$data/store.zarr \
  ${ground[@]+"${ground[@]}"} members_in=5 output=$run overwrite=true
say "done: $run/report.html, $run/scores.json, $run/forecast/*.nc"
