#!/usr/bin/env bash
# Run the tests on other versions of Python and torch; print one line per pair, and exit 1 if a test failed.
#
#     tests/matrix.sh 3.10:2.13 3.12:2.14                 # each in an environment of its own, made anew
#     tests/matrix.sh 3.13:2.14 -- -m fast                # pytest's options after --
#
# Needs uv, which shares the packages of its environments, and the Pythons. Tests run in a clone of HEAD. Environments are
# deleted afterwards; logs stay in $MATRIX_LOGS (default: a new folder).
set -euo pipefail
cd "$(dirname "$0")/.."

pairs=()
while (($#)) && [[ $1 != -- ]]; do pairs+=("$1"); shift; done
shift || true
((${#pairs[@]})) || { sed -n '2,9s/^# \?//p' "$0"; exit 2; }

logs=$(realpath "${MATRIX_LOGS:-$(mktemp -d)}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git clone -q . "$scratch/checkout"
# constraints.txt belongs to one torch; another brings other CUDA packages, and asks for another setuptools
grep -vE '^(torch|triton|cuda|nvidia|setuptools)' constraints.txt > "$scratch/constraints.txt"

count() { # the number before a word of pytest's last line
    tail -n 1 "$1" | grep -oE "[0-9]+ $2" | cut -d' ' -f1 || echo 0
}

status=0
for pair in "${pairs[@]}"; do
    python=${pair%:*} torch=${pair#*:} log="$logs/${pair/:/-}.log"
    uv venv -q --seed --clear --python "$python" "$scratch/venv"
    (
        cd "$scratch/checkout"
        . "$scratch/venv/bin/activate"
        uv pip install -q -c "$scratch/constraints.txt" "torch==$torch.*" -e ".[test]"
        pytest -q -n 3 --dist worksteal "$@"
    ) > "$log" 2>&1 || status=1
    versions=$("$scratch/venv/bin/python" -c 'if True:
        import platform, pytorch_lightning, torch
        print(f"{platform.python_version()}, torch {torch.__version__}, Lightning {pytorch_lightning.__version__}")')
    failed=$(($(count "$log" failed) + $(count "$log" error)))
    echo "Python $versions: $(count "$log" passed) passed, $failed failed, $(count "$log" skipped) skipped ($log)"
done
exit $status
