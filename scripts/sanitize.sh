#!/usr/bin/env bash
# compute-sanitizer over the CUDA kernels: memcheck and racecheck for each, on small shapes, on one GPU.
#
#   scripts/sanitize.sh [build|run]     build tests/cuda/kernel_check, run it under the sanitizer (default: both)
#
# Needs nvcc 13 or what torch was built with; no torch. Environment:
#   CUDA_HOME      CUDA toolkit (default: nvcc's, else /usr/local/cuda)
#   CUTLASS_PATH   CUTLASS's folder or its include folder (default: where Python's nvidia-cutlass package is)
#   ARCHS          architectures to build, of "80 90a" (default: both)
#   BUILD_DIR      objects and program (default: build/kernel_check)
#   JOBS           compilations at a time (default: the number of processors)
#   KERNEL_CHECK   program to run instead of the one built here
#   TOOLS          sanitizer tools (default: "memcheck racecheck")
#   TARGETS        what to check (default: all that ARCHS has)
#   STEP_TIMEOUT   seconds for each step (default: 300)
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-all}
cuda_home=${CUDA_HOME:-$(nvcc=$(command -v nvcc) && dirname "$(dirname "$nvcc")" || echo /usr/local/cuda)}
archs=${ARCHS:-80 90a}
build_dir=${BUILD_DIR:-build/kernel_check}
program=${KERNEL_CHECK:-$build_dir/kernel_check}

has_arch() { [[ " $archs " == *" $1 "* ]]; }

cutlass_include() {
  local root=${CUTLASS_PATH:-}
  if [[ -z $root ]]; then
    root=$(python3 -c 'import importlib.util as u; print(u.find_spec("cutlass_library").submodule_search_locations[0])')/source
  fi
  [[ -d $root/include/cutlass ]] && root=$root/include
  if [[ ! -d $root/cutlass ]]; then
    echo "sanitize.sh: no CUTLASS headers under '$root': set CUTLASS_PATH" >&2
    return 1
  fi
  echo "$root"
}

build() {
  local include jobs=${JOBS:-$(nproc)} list=$build_dir/commands
  include=$(cutlass_include)
  mkdir -p "$build_dir"
  local common="-std=c++20 -O3 -DNDEBUG -lineinfo --expt-relaxed-constexpr -Icsrc -I$include"
  local sm80="-gencode=arch=compute_80,code=[sm_80,compute_80]"
  local sm90="-gencode=arch=compute_90a,code=sm_90a"
  local both=""
  if has_arch 80; then common+=" -DOVERLAP_WITH_SM80"; both+=" $sm80"; fi
  if has_arch 90a; then common+=" -DOVERLAP_WITH_SM90"; both+=" $sm90"; fi

  # Other flags than last time: every object is stale.
  if [[ $(cat "$build_dir/flags" 2>/dev/null) != "$common$both" ]]; then
    rm -f "$build_dir"/*.o
    echo "$common$both" >"$build_dir/flags"
  fi

  # One command a line, the slow ones (CUTLASS, Hopper) first; an object newer than every source is kept.
  : >"$list"
  local source object flags objects=()
  for source in csrc/kernels/*_sm90.cu csrc/kernels/*_sm80.cu csrc/kernels/*.cu csrc/plan/*.cc tests/cuda/kernel_check.cu; do
    flags=$both
    case $source in
      *_sm90.cu) has_arch 90a || continue; flags=$sm90 ;;
      *_sm80.cu) has_arch 80 || continue; flags=$sm80 ;;
    esac
    object=$build_dir/$(basename "$source").o
    [[ " ${objects[*]-} " == *" $object "* ]] && continue
    objects+=("$object")
    if [[ -e $object && -z $(find csrc/kernels csrc/plan tests/cuda -newer "$object" \( -name '*.h' -o -name '*.cuh' -o -path "$source" \)) ]]; then
      continue
    fi
    echo "$cuda_home/bin/nvcc $common $flags -c $source -o $object" >>"$list"
  done
  # shellcheck disable=SC2016  # the inner shell expands
  xargs -P "$jobs" -I COMMAND sh -c 'echo "${1##* -c }"; exec $1' _ COMMAND <"$list"
  # shellcheck disable=SC2086  # a list of flags
  "$cuda_home/bin/nvcc" $both -o "$build_dir/kernel_check" "${objects[@]}"
  echo "sanitize.sh: built $build_dir/kernel_check for $archs"
}

run() {
  local sanitizer targets=${TARGETS:-} tool target failed=0
  sanitizer=$(command -v compute-sanitizer || echo "$cuda_home/bin/compute-sanitizer")
  if [[ ! -x $sanitizer ]]; then
    echo "sanitize.sh: no compute-sanitizer on PATH or in $cuda_home/bin: install the CUDA toolkit or set CUDA_HOME" >&2
    return 1
  fi
  if [[ -z $targets ]]; then
    targets="signal reorder peers"
    if has_arch 80; then targets+=" sm80"; fi
    if has_arch 90a; then targets+=" sm90pp sm90ppwide sm90coop ring"; fi
  fi
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
