#!/usr/bin/env bash
# All checks and tests, in an environment of their own.
#
# --slow adds the tests that take four seconds or more and repeat much of what faster ones cover, and measures the coverage of
# all other tests: before Python 3.12 these then take 1.5 times as long. Files come in the order of tests/durations.json, the
# longest first, and types are checked beside the tests.
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."
. scripts/environment.sh test
slow=""
[ "${1:-}" = --slow ] && slow=yes && shift
ruff check .
ruff format --check .
rm -f .coverage .coverage.*
types=$(mktemp)
mypy >"$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true; rm -f "$types"' EXIT
failed=0 ran=""
# Three workers on two cores, one thread each: tests wait for a fifth of their time, on ranks and programs that are slow
# or gone. They test results, not speed, so sharing cores does no harm.
run() {
  OMP_NUM_THREADS=1 python -m pytest -n "${TEST_WORKERS:-3}" "$@" && ran=yes && return
  code=$?
  case $code in 2 | 3 | 4) exit $code ;; esac  # interrupted, or no run at all
  [ $code = 5 ] || failed=$code  # 5: none of the tests asked for is of this kind
}
files=(--dist loadscope --no-loadscope-reorder)
if [ -n "$slow" ]; then
  if python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then export COVERAGE_CORE=sysmon; fi
  run "${files[@]}" --cov --cov-report=term --cov-fail-under=88 "$@"
else
  run "${files[@]}" -m "not slow" "$@"
fi
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  export TEST_GPU=1
  if [ -n "$slow" ]; then run -m gpu "$@"; else run -m "gpu and not slow" "$@"; fi
fi
[ -n "$ran" ] || [ "$failed" != 0 ] || failed=5
wait "$mypy" || failed=$?
trap 'rm -f "$types"' EXIT
cat "$types"
exit "$failed"
