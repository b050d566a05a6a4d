#!/bin/sh
# Records every space on the GPU of this host, and compares a search with triton.autotune. From the repository's root:
#
#     benchmarks/search_quality/on_gpu.sh OUT_DIR
#
# OUT_DIR gets recordings.tar (recordings, the database, what was printed), triton_autotune.json and table.txt. What does
# not fit in RECORD_S and TRITON_S seconds is left out, and told. The database of an earlier run as OUT_DIR/h200.db is
# gone on with.
set -u
out=${1:?where the files go}
python=${PYTHON:-python}
device=${DEVICE:-cuda:0}
record_s=${RECORD_S:-300}
triton_s=${TRITON_S:-150}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir "$work/h200"
[ -f "$out/h200.db" ] && mv "$out/h200.db" "$work/h200/h200.db"

began=$(date +%s)
TRITON_CACHE_DIR="$work/triton" timeout -k 10 $((record_s + 45)) "$python" -m benchmarks.search_quality.record \
    "$work/h200" ${NAMES:-} --device "$device" --db "$work/h200/h200.db" --limit-s "${LIMIT_S:-120}" --all-s "$record_s" \
    >"$work/h200/record.txt" 2>"$work/h200/record.err"
echo "record: exit code $?, $(($(date +%s) - began)) s" >>"$work/h200/record.txt"
tail -c 4000 "$work/h200/record.err" >>"$work/h200/record.txt"
rm -f "$work/h200/record.err"
tar -C "$work" -cf "$out/recordings.tar" h200

began=$(date +%s)
timeout -k 10 "$triton_s" "$python" -m benchmarks.search_quality.triton_autotune "$out/triton_autotune.json" \
    --device "$device" ${SIDE:+--side "$SIDE"} >"$work/triton.txt" 2>&1
echo "triton_autotune: exit code $?, $(($(date +%s) - began)) s" >>"$work/triton.txt"

cat "$work/h200/record.txt" "$work/triton.txt" >"$out/table.txt"
cat "$out/table.txt"
