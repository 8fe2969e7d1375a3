#!/usr/bin/env bash
# Skill on a real ensemble: fetches a cut of WeatherBench 2 by URL, trains on it, and scores a year that no training saw.
#
#   scripts/realdata.sh wb2 [SETTING=VALUE ...]     settings are those of benchmark=skill
#
# The cut: ECMWF's IFS ENS at 64 x 32 points, 2018 to 2022, t and z at 500 and 850 hPa, 2 m temperature and mean sea level
# pressure, 24 and 48 h ahead, with ERA5 as truth. 2018 to 2020 train, 2021 chooses, 2022 is scored. About 12 GB are read:
# a quarter of an hour at 100 Mbit. It leaves runs/wb2/{store.zarr, skill/results.json, skill/report.html}, and prints the
# table; run again, it goes on where it stopped. The ensemble's terms (TIGGE) allow research only.
#
# WB2_ENSEMBLE and WB2_TRUTH name other copies, WB2_RUN another folder; WB2_TRAIN, WB2_VALIDATION and WB2_TEST other dates.
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."
[ "${1:-}" = wb2 ] || { echo "usage: scripts/realdata.sh wb2 [SETTING=VALUE ...]" >&2; exit 2; }
shift
command -v ensemble-ml >/dev/null || . scripts/environment.sh remote
run=${WB2_RUN:-runs/wb2}
train=${WB2_TRAIN:-2018/2020} validation=${WB2_VALIDATION:-2021} test=${WB2_TEST:-2022}

echo "== 1/2 prepare: the cut as a tensor store"
[ -d "$run/store.zarr" ] || ensemble-ml prepare "input=${WB2_ENSEMBLE:-wb2:ifs_ens/64x32}" "truth=${WB2_TRUTH:-wb2:era5/64x32}" \
  'variables=[t,z,t2m,msl]' 'levels=[500,850]' 'leads=[24,48]' "dates=['$train','$validation','$test']" \
  "output=$run/store.zarr"
echo "== 2/2 skill: train, and score $test"
ensemble-ml benchmark benchmark=skill "skill.store=$run/store.zarr" "skill.train=['$train']" \
  "skill.validation=['$validation']" "skill.test=['$test']" "output=$run" "$@"
