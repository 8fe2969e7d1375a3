#!/usr/bin/env bash
# All checks and tests, in an environment of their own.
#
# --slow adds those that take four seconds or more where others test the like in less, and measures coverage, which makes
# all of them 1.6 times as long.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
select=(-m "not slow")
[ "${1:-}" = --slow ] && select=(--cov --cov-report=term --cov-fail-under=85) && shift
ruff check .
ruff format --check .
mypy
rm -f .coverage .coverage.*
# Two workers on two cores, one thread each: what the tests measure is right and wrong, not speed.
OMP_NUM_THREADS=1 python -m pytest -n "${TEST_WORKERS:-2}" --dist loadscope "${select[@]}" "$@"
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  gpu="gpu and not slow"
  if [ "${select[0]}" = --cov ]; then gpu=gpu; fi
  TEST_GPU=1 OMP_NUM_THREADS=1 python -m pytest -n "${TEST_WORKERS:-2}" -m "$gpu" "$@" || [ $? = 5 ]  # 5: none of them
fi
