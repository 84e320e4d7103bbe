#!/bin/sh
# Draw every .dot of this folder as .svg, by graphviz. The drawing keeps its source's checksum, which a test compares.
set -eu
cd "$(dirname "$0")"
for source in *.dot; do
  sum=$(sha256sum "$source" | cut -d " " -f 1)
  { echo "<!-- $source sha256 $sum -->"; dot -Tsvg "$source" | sed -e '1,/^<!DOCTYPE/d' -e '/svg11.dtd">/d' -e '/^<!-- /d' -e '/ -->$/d'; } > "${source%.dot}.svg"
done
