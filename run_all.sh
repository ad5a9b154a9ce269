#!/usr/bin/env bash
# The main job: set up, execute every notebook, regenerate every figure, check every claim.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

usage() {
  cat <<'TEXT'
usage: ./run_all.sh [--profile smoke|cpu|gpu|full] [--only 01,02] [--output DIR] [--resume] [--set NAME=VALUE ...]
       ./run_all.sh --test
       ./run_all.sh --help

Without options: sets up (in .venv, or in the virtual or conda environment that is active), runs every notebook
with profile cpu and ends with the scoreboard. Exit status 1 when a notebook or a claim fails, or nothing was checked.

  --profile   smoke: tiny sizes, minutes. cpu (default): real small models, about an hour. gpu: also every
              performance figure, on an NVIDIA GPU. full: the papers' own models, from the Hugging Face hub
  --only      notebooks by number or name, comma-separated
  --output    folder for the figures; by default figures/ for cpu, results/<profile>/ for the others, and
              results/custom/ with --set
  --resume    skip what the last run in the same output folder finished
  --set       a parameter of the notebooks, as model=/path/to/model or n_texts=64; may be repeated
  --test      the same set-up, then lint, tests and a smoke run of every notebook

The other options of `diffkv-repro reproduce` (--seed, --cell-timeout, --notebook-timeout) work too.
TEXT
}

refuse() { echo "run_all.sh: $1" >&2; exit 2; }

# Options are looked at before anything is installed; the command itself checks their values.
test_run=false full=false own_model=false arguments=("$@")
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --test) test_run=true; shift; continue ;;
    --resume) shift; continue ;;
    --profile | --only | --output | --set | --seed | --cell-timeout | --notebook-timeout)
      [ $# -ge 2 ] || refuse "$1 needs a value" ;;
    *) refuse "unknown option $1; ./run_all.sh --help lists them" ;;
  esac
  case "$1 $2" in
    "--profile smoke" | "--profile cpu" | "--profile gpu") full=false ;;
    "--profile full") full=true ;;
    --profile\ *) refuse "unknown profile '$2'; there are smoke, cpu, gpu, full" ;;
    "--set model="*) own_model=true ;;
  esac
  shift 2
done
if $test_run && [ ${#arguments[@]} -gt 1 ]; then refuse "--test takes no other option"; fi

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

# The environment that is active, unless it is conda's own base; else .venv.
if [ -n "${VIRTUAL_ENV:-}" ]; then
  python="$VIRTUAL_ENV/bin/python"
elif [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-}" != base ]; then
  python="$CONDA_PREFIX/bin/python"
else
  python="$root/.venv/bin/python"
  if ! supported "$python"; then
    for base in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
      supported "$base" && break
      base=
    done
    [ -n "$base" ] || refuse "no Python 3.11, 3.12 or 3.13 found; install one, or name it: PYTHON=/path ./run_all.sh"
    echo "creating .venv with $("$base" --version)"
    "$base" -m venv --clear "$root/.venv"
  fi
fi
supported "$python" || refuse "$python is not Python 3.11, 3.12 or 3.13; activate another environment"

extras='' && $test_run && extras='[dev]'
if $full; then extras='[benchmarks]'; fi # what lm-eval needs to score MATH and LongBench
lock="$root/requirements.lock"
stamp="$("$python" -c 'import sys; print(sys.prefix)')/.diffkv-repro-setup"
wanted="$("$python" -c 'import hashlib, sys
print(hashlib.sha256(b"".join(open(p, "rb").read() for p in sys.argv[1:])).hexdigest())' \
  "$root/pyproject.toml" "$lock") $root"
# A set-up with extras serves the main job too, where that needs none.
accepted=(-e "$wanted $extras")
if [ -z "$extras" ]; then accepted+=(-e "$wanted [dev]" -e "$wanted [benchmarks]"); fi
if ! grep -qsxF "${accepted[@]}" "$stamp"; then
  echo "installing from requirements.lock (some 2 GB on a machine without a GPU; a few minutes)"
  rm -f "$stamp"
  "$python" -m pip install -qq -c "$lock" "$(grep '^torch==' "$lock")"
  "$python" -m pip install -qq -c "$lock" -e "$root$extras"
  echo "$wanted $extras" >"$stamp"
fi
command=("$python" -m diffkv_repro.cli)

if $test_run; then
  cd "$root"
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # two threads on busy cores are many times slower than one
  "${command[@]}" fetch smollm2-135m
  "$python" -m ruff check .
  "$python" -m ruff format --check .
  "$python" -m pytest
  "${command[@]}" reproduce --profile smoke
  "${command[@]}" check
else
  $own_model || "${command[@]}" fetch smollm2-135m
  "${command[@]}" reproduce ${arguments[@]+"${arguments[@]}"}
fi
