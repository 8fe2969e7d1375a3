# Sourced by the other scripts: makes the virtual environment that they run in, and leaves its programs first on PATH.
#
#   . scripts/environment.sh EXTRAS      e.g. simulate,tracking
#
# ENSEMBLE_ML_VENV names another place than .venv. A finished installation is recognised by a stamp for its extras, so
# that a second call costs nothing until this checkout's place, pyproject.toml, constraints.txt, native.c or the script that
# compiles it (hatch_build.py) change.

unset CDPATH  # with which cd prints where it went
export PIP_USER=0  # a site's pip.conf may set user=true, which virtual environments refuse
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${ENSEMBLE_ML_VENV:-$root/.venv}
extras=${1:?extras to install}
case $venv in /*) ;; *)
  echo "ensemble_ml: ENSEMBLE_ML_VENV=$venv: give an absolute path" >&2
  return 1
esac

find_python() {
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null &&
      echo "$candidate" && return
  done
  echo "ensemble_ml: Python 3.11 to 3.13 with venv and pip is needed; set PYTHON to one" >&2
  return 1
}

# pip, silent but for errors; a line every half minute says that it still runs. The process that prints it ends with this shell,
# and its sleep holds no pipe open.
install() {
  local ticker code=0
  ticker=$(
    began=$SECONDS
    while sleep 30 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
      echo "ensemble_ml: still installing ($((SECONDS - began)) s, $(du -sm "$venv" 2>/dev/null | cut -f1) MB so far)" >&2
    done >/dev/null &
    echo $!
  )
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@" || code=$?
  kill "$ticker" 2>/dev/null
  return $code
}

sources=("$root/pyproject.toml" "$root/constraints.txt" "$root/ensemble_ml/store/native.c" "$root/scripts/hatch_build.py")
digest=$({ echo "$root"; cat "${sources[@]}"; } | cksum | cut -d' ' -f1)
stamp=$venv/.ensemble-ml-$digest-$extras
if [ ! -e "$stamp" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then  # its Python may have been removed
  echo "ensemble_ml: installing into $venv (once; a few minutes)"
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # an earlier installation may have been interrupted before pip
    clear=--clear
    if [ -n "${ENSEMBLE_ML_VENV:-}" ]; then
      if [ -e "$venv/bin/python" ]; then
        echo "ensemble_ml: ENSEMBLE_ML_VENV=$venv has no pip; give another, or add it (python -m ensurepip)" >&2
        return 1
      elif [ -L "$venv/bin/python" ]; then
        echo "ensemble_ml: ENSEMBLE_ML_VENV=$venv: the Python that it was made of is gone; remove it, or give another" >&2
        return 1
      fi
      clear=
    fi
    python=$(find_python) && "$python" -m venv $clear "$venv" || return 1
  fi
  constraints=$root/constraints.txt others=
  # In an environment that ENSEMBLE_ML_VENV names, a torch of 2.11 or later stays, such as one built for a site's GPUs.
  if [ -n "${ENSEMBLE_ML_VENV:-}" ] && "$venv/bin/python" -c 'import sys, torch; sys.exit([*map(int, torch.__version__.split(".")[:2])] < [2, 11])' 2>/dev/null; then
    others=$(mktemp) && grep -v '^torch==' "$constraints" >"$others" && constraints=$others
  else  # torch first and alone: a package that depends on it would otherwise choose its build
    install "$(grep '^torch==' "$constraints")" || return 1
  fi
  install -c "$constraints" -e "$root[$extras]" || return 1
  [ -z "$others" ] || rm -f "$others"
  find "$venv" -maxdepth 1 -name '.ensemble-ml-*' ! -name ".ensemble-ml-$digest-*" -delete
  touch "$stamp"
fi
export PATH=$venv/bin:$PATH
unset clear python sources digest stamp extras constraints others
