#!/usr/bin/env bash
# compute-sanitizer over the CUDA kernels: memcheck and racecheck for each, on small shapes, on one GPU.
#
#   scripts/sanitize.sh [build|run]     build tests/cuda/kernel_check, run it under the sanitizer (default: both)
#
# The program is built as the library is (`python setup.py build_kernel_check`). Environment:
#   PYTHON         Python that has torch, for building (default: python3)
#   KERNEL_CHECK   program to run instead of the one built here
#   TOOLS          sanitizer tools (default: "memcheck racecheck")
#   TARGETS        what to check (default: all)
#   STEP_TIMEOUT   seconds for each step (default: 300)
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-all}
cuda_home=${CUDA_HOME:-$(nvcc=$(command -v nvcc) && dirname "$(dirname "$nvcc")" || echo /usr/local/cuda)}
program=${KERNEL_CHECK:-}

build() {
  # As the library is built, of the same objects.
  program=$("${PYTHON:-python3}" setup.py build_kernel_check | tail -n 1)
  echo "sanitize.sh: built $program"
}

run() {
  local sanitizer targets=${TARGETS:-} tool target failed=0
  sanitizer=$(command -v compute-sanitizer || echo "$cuda_home/bin/compute-sanitizer")
  if [[ ! -x $sanitizer ]]; then
    echo "sanitize.sh: no compute-sanitizer on PATH or in $cuda_home/bin: install the CUDA toolkit or set CUDA_HOME" >&2
    return 1
  fi
  [[ -n $program ]] || program=$(ls -t build/*-cuda/kernel_check | head -n 1)
  [[ -n $targets ]] || targets=$("$program" list)
  for target in $targets; do
    for tool in ${TOOLS:-memcheck racecheck}; do
      echo "== $tool: $target"
      if ! timeout "${STEP_TIMEOUT:-300}" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
        "$program" "$target" --small --repeat 2; then
        echo "sanitize.sh: $tool of $target failed (124: it ran past STEP_TIMEOUT)" >&2
        failed=1
      fi
    done
  done
  return $failed
}

case $mode in
  build) build ;;
  run) run ;;
  all)
    [[ -n ${KERNEL_CHECK:-} ]] || build
    run
    ;;
  *)
    echo "sanitize.sh: unknown argument '$mode': take build or run, or none for both" >&2
    exit 2
    ;;
esac
