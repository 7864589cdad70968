#!/usr/bin/env bash
# Make torchvision's compiled operators load beside a CPU build of torch: `tests/zoo/torchvision_on_cpu.sh PYTHON`.
#
# The wheels in the registry are built for CUDA: their library names libraries that a CPU build of torch has not, and
# without it `import torchvision` raises (and so do torchmetrics and Lightning, which import it where it is installed).
# Its kernels for the CPU need none of their functions, so two libraries that define the names and nothing else do.
# Wants gcc and binutils, and for an environment of its own only: nothing for CUDA will run in it.
set -euo pipefail

python=${1:-python}
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nm -D --undefined-only "$site/torchvision/_C.so" | awk '{print $2}' | sed 's/@.*//' | grep -E '^_ZNK?(2at|3c10)4cuda' |
    sort -u | awk '{print "char " $1 "[64];"}' > "$work/names.c"
stubs=$site/torchvision.libs
cudart=$(basename "$stubs"/libcudart.*.so.*)
for library in libc10_cuda libtorch_cuda; do
    gcc -shared -fPIC -Wl,-soname,$library.so -o "$stubs/$library.so" "$work/names.c"
done
# Python loads them as it starts, so that the loader finds them by name when torchvision is imported.
cat > "$site/torchvision_on_cpu.pth" <<END
import ctypes; list(map(lambda name, load=ctypes.CDLL, every=ctypes.RTLD_GLOBAL: load("$stubs/" + name, every), ("$cudart", "libc10_cuda.so", "libtorch_cuda.so")))
END
