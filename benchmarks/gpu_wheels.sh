#!/bin/sh
# Wheels for a GPU machine without network that has Python 3.12, torch and transformers: what Covey, its tests and TRL need on top.
#
#     benchmarks/gpu_wheels.sh FOLDER            # here, with network
#     python benchmarks/gpu.py --wheels FOLDER   # there
set -eu
folder=${1:?give a folder for the wheels}
mkdir -p "$folder"
for package in datasets dill multiprocess rich jsonargparse trl==1.16.0 liger-kernel==0.8.5 peft pytest iniconfig pluggy pygments pytest-timeout pytest-xdist execnet \
    math-verify latex2sympy2_extended antlr4-python3-runtime==4.13.2 typeshed-client docstring-parser; do
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$folder" "$package"
done
python3 -m pip wheel -q --no-deps -w "$folder" "$(dirname "$0")/.."
du -sh "$folder"
