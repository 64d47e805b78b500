#!/usr/bin/env bash
# Installs as a user does, on CPU: a wheel out of the source distribution, and an editable checkout, each into an
# environment of its own that has the torch of the Python given, and nothing of this checkout. Both have the same path, so
# that the second build takes over objects of the first: ninja compares commands and times.
#   scripts/try_install.sh .venv/bin/python
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(cd "$(dirname "${1:?a Python that has torch}")" && pwd)/$(basename "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OVERLAP_CUDA=0 GLOO_SOCKET_IFNAME=lo PIP_DISABLE_PIP_VERSION_CHECK=1

# A fresh environment, into which the packages are linked that torch needs.
environment() {
    "$python" -m venv "$1"
    local from to
    from=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    to=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    local entry
    for entry in "$from"/*; do
        case "$(basename "$entry")" in
            *overlap_torch* | pip | pip-* | setuptools* | pybind11* | ninja* | __pycache__) ;;
            *) [ -e "$to/$(basename "$entry")" ] || ln -s "$entry" "$to/" ;;
        esac
    done
}

# The op, from a folder that is not the checkout; and what the metadata says of torch.
smoke() {
    mkdir -p "$folder/elsewhere"
    (cd "$folder/elsewhere" && "$1/bin/python" - <<'PYTHON' && "$1/bin/python" -m overlap_torch demo --world 2 --device cpu --m 256 --n 256 --k 64)
import importlib.metadata
import torch
import overlap_torch

release = ".".join(torch.__version__.split(".")[:2])
required = importlib.metadata.requires("overlap_torch")
assert f"torch=={release}.*" in required, required
assert torch.ops.overlap.build_info().startswith("cuda=none;"), torch.ops.overlap.build_info()
print("installed:", overlap_torch.__file__)
PYTHON
}

mkdir "$folder/source"
(cd "$root" && git ls-files -co --exclude-standard -z | tar --null -T - -cf - 2>/dev/null) | tar xf - -C "$folder/source"

echo "== source distribution"
(cd "$folder/source" && PYTHONPATH=tools "$python" -c "import build_backend; build_backend.build_sdist('$folder')" >/dev/null)
# Objects that know neither torch nor Python's environment are this checkout's, where they are newer than their sources.
if [ -d "$root/build/plan" ]; then
    mkdir "$folder/source/build" && cp -a "$root/build/plan" "$folder/source/build/"
fi

echo "== editable checkout"
environment "$folder/environment"
"$folder/environment/bin/python" -m pip --quiet install --editable "$folder/source"
smoke "$folder/environment"

echo "== wheel out of it"
rm -rf "$folder/environment"
environment "$folder/environment"
mkdir "$folder/unpacked"
tar xzf "$folder"/overlap_torch-*.tar.gz -C "$folder/unpacked" --strip-components=1
mv "$folder/source/build" "$folder/unpacked/"
"$folder/environment/bin/python" -m pip --quiet wheel --no-deps --wheel-dir "$folder" "$folder/unpacked"
"$folder/environment/bin/python" -m pip --quiet install "$folder"/overlap_torch-*.whl
smoke "$folder/environment"
