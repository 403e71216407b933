#!/usr/bin/env bash
# Fill keras.datasets.fashion_mnist's cache from Debian's package
# dataset-fashion-mnist, which holds the same files, where Keras cannot
# download them.
set -euo pipefail

cache="${KERAS_HOME:-$HOME/.keras}/datasets/fashion-mnist"
files=(train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz
    t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz)
missing=0
for file in "${files[@]}"; do
    [ -s "$cache/$file" ] || missing=1
done
[ "$missing" = 1 ] || exit 0

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# apt's sandbox user must be able to write here.
chmod 755 "$scratch"
apt-get update -qq
(cd "$scratch" && apt-get download -qq dataset-fashion-mnist)
dpkg-deb -x "$scratch"/dataset-fashion-mnist_*.deb "$scratch"
mkdir -p "$cache"
for file in "${files[@]}"; do
    cp "$scratch/usr/share/datasets/fashion-mnist/$file" "$cache/$file"
done
