#!/usr/bin/env bash
# Remake the embedded folders on one GPU, in two calls of under ten minutes each:
#   benchmarks/demo_model/remake.sh model OUT    the demo model, onward from the folder that ships, or from a file in parts
#                                                in build/remake/parts (MINUTES=7.4, STEPS=10000, RATE=3e-3)
#   benchmarks/demo_model/remake.sh rest OUT     draft, head, scores and canary of it
# What is made lies in build/remake (or WORK), what is to be kept in OUT: few files, each under 16 MiB. Where build/remake/demo was
# lost between the calls, `rest` takes the model's parts from build/remake/parts.
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=$1 out=$2 python=${PYTHON:-python3} work=${WORK:-build/remake} shipped=engine_core/embedded
mkdir -p "$out" "$work"

joined() { # the folder $1 with weights from build/remake/parts
    mkdir -p "$1"
    cp "$shipped"/demo/*.json "$shipped"/demo/*.jinja "$1/"
    cat "$work"/parts/model.safetensors.part-* >"$1/model.safetensors"
}

train() { "$python" -u -m benchmarks.demo_model.train "$@"; }

case $stage in
model)
    start=$shipped/demo
    if [ -d "$work/parts" ]; then
        start=$work/start
        joined "$start"
        rm -r "$work/parts" # `rest` takes what is made now
    fi
    train --start "$start" --rate "${RATE:-3e-3}" --out "$work/demo" --steps "${STEPS:-10000}" --minutes "${MINUTES:-7.4}" \
        --seed "${SEED:-2}" --score-every 0 ${TRAIN_ARGS:-} 2>&1 | tee "$out/model.log"
    split -b 12M "$work/demo/model.safetensors" "$out/model.safetensors.part-"
    tee "$out/SHA256SUMS" <"$work/demo/SHA256SUMS"
    ;;
rest)
    if [ ! -e "$work/demo/model.safetensors" ]; then
        joined "$work/demo"
    fi
    evaluate() { timeout "${EVALUATE_S:-260}" "$python" -u -m benchmarks.demo_model.evaluate "$work/demo" "$@"; }
    count=${COUNT:-100}
    CUDA_VISIBLE_DEVICES='' "$python" -m benchmarks.demo_model.canary "$work/demo" "$out/canary.jsonl" \
        >"$out/canary.log" 2>&1 &
    canary=$!
    evaluate --count "$count" --batch 50 --json "$out/scores.json" >"$out/scores.log" 2>&1 &
    scores=$!
    train --draft --teacher "$work/demo" --out "$work/draft" --steps "${DRAFT_STEPS:-3600}" --minutes "${DRAFT_MINUTES:-2.2}" --score-every 0 \
        --workers "${WORKERS:-12}" ${TRAIN_ARGS:-} 2>&1 | tee "$out/draft.log"
    cp "$work/draft/model.safetensors" "$out/draft.safetensors"
    wait "$scores" || echo "the scores did not end" | tee -a "$out/scores.log"
    evaluate --draft "$work/draft" --count "${ACCEPTED_COUNT:-4}" --json "$out/acceptance.json" >>"$out/draft.log" 2>&1 &
    accepted=$!
    "$python" -u -m benchmarks.demo_model.head --teacher "$work/demo" --out "$work/eagle" --minutes "${HEAD_MINUTES:-2}" \
        --rows "${HEAD_ROWS:-16}" --again 5 --turns 4 >"$work/head.log" 2>&1
    tail -n 3 "$work/head.log" | tee -a "$out/draft.log"
    cp "$work/eagle/model.safetensors" "$out/eagle.safetensors"
    wait "$accepted" || echo "the acceptance did not end" | tee -a "$out/draft.log"
    wait "$canary" || echo "the canary was not written" | tee -a "$out/canary.log"
    tail -n 30 "$out/scores.log"
    ;;
*)
    echo "remake.sh model|rest OUT" >&2
    exit 2
    ;;
esac
