#!/usr/bin/env bash
# Runs fuzz targets on a machine without Rust: `cargo xtask fuzz --bundle DIR` puts this beside `bin/` and `corpus/`.
#
#   run.sh [-j CPUS] SECONDS [OUT] [TARGET...]
#
# All targets (or those named) for SECONDS each, CPUS processes at once (default: as many as there are CPUs). Each target
# has its part of them, which share its corpus, and at least one; with fewer CPUs than targets, some run after others.
# OUT (default: ./fuzz-out) gets the grown corpora, which a later run goes on with, the inputs of findings
# (`artifacts/TARGET`), logs, and `summary.jsonl`, one line for each target, which is also printed. Status: 0 without
# findings, 1 with some, 2 if something did not run.
set -u

cpus=$(nproc)
if [ "${1-}" = -j ]; then
    cpus=${2:?-j needs a number of CPUs}
    shift 2
fi

here=$(cd "$(dirname "$0")" && pwd)
seconds=${1:?usage: run.sh [-j CPUS] SECONDS [OUT] [TARGET...]}
out=${2:-fuzz-out}
[ $# -ge 2 ] && shift 2 || shift $#
if [ $# -gt 0 ]; then targets=("$@"); else targets=($(ls "$here/bin" | sed 's/\.gz$//')); fi
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
each=$((cpus / ${#targets[@]}))
more=$((cpus % ${#targets[@]}))
[ "$each" -ge 1 ] || { each=1; more=0; }

# One process: its messages go to LOG, its CPU time, s, to LOG.cpu, its status to LOG.rc.
one() {
    local target=$1 log=$2 rc TIMEFORMAT='%U %S'
    { time nice timeout -k 30 $((seconds + 120)) "$out/bin/$target" \
        -artifact_prefix="$out/artifacts/$target/" -timeout=20 -rss_limit_mb=2048 \
        -max_total_time="$seconds" -print_final_stats=1 "$out/corpus/$target" >"$log" 2>&1; } 2>"$log.cpu"
    rc=$?
    echo "$rc" >"$log.rc"
}

n=0
for target in "${targets[@]}"; do
    mkdir -p "$out/bin" "$out/corpus/$target" "$out/artifacts/$target" "$out/log" || exit 2
    gunzip -c "$here/bin/$target.gz" >"$out/bin/$target" && chmod +x "$out/bin/$target" || exit 2
    cp "$here/corpus/$target"/* "$out/corpus/$target/" || exit 2
    rm -f "$out/log/$target".*
    processes=$((each + (n < more)))
    for i in $(seq "$processes"); do
        [ "$(jobs -rp | wc -l)" -lt "$cpus" ] || wait -n
        one "$target" "$out/log/$target.$i" &
    done
    n=$((n + 1))
done
wait

rm -rf "$out/bin"
status=0
: >"$out/summary.jsonl"
for target in "${targets[@]}"; do
    processes=0 executions=0 edges=0 cpu=0 failed=0
    for rc in "$out/log/$target".*.rc; do
        log=${rc%.rc}
        processes=$((processes + 1))
        [ "$(cat "$rc")" = 0 ] || failed=$((failed + 1))
        executions=$((executions + $(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1 | grep . || echo 0)))
        seen=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | sort -n | tail -n 1)
        [ "${seen:-0}" -le "$edges" ] || edges=$seen
        cpu=$(awk -v sum="$cpu" '{ sum += $1 + $2 } END { printf "%.1f", sum }' "$log.cpu")
    done
    artifacts=$(cd "$out/artifacts/$target" && ls | sed 's/.*/"&"/' | paste -sd, -)
    findings=$(ls "$out/artifacts/$target" | wc -l)
    [ "$findings" -eq 0 ] || status=1
    [ "$failed" -eq 0 ] || [ "$status" -eq 1 ] || status=2
    printf '{"target":"%s","processes":%d,"seconds":%d,"executions":%d,"edges":%d,"cpu_seconds":%s,"failed_processes":%d,"findings":%d,"artifacts":[%s]}\n' \
        "$target" "$processes" "$seconds" "$executions" "$edges" "$cpu" "$failed" "$findings" "$artifacts" | tee -a "$out/summary.jsonl"
done
exit $status
