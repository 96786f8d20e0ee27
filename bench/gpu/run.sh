#!/usr/bin/env bash
# Runs the GPU suite. See README.md beside this file.
#   run.sh --bundle DIR --out DIR [STEP…]     the usual steps if none is named
# Extra arguments of a step come in <STEP>_ARGS, e.g. PAIRS_ARGS="--seconds 4".
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Of each step, from steps.py: seconds after which it is ended; and those that run if none is named.
declare -A limit_s
all_steps=()
while read -r name limit when; do
    limit_s[$name]=$limit
    [[ $when == named ]] || all_steps+=("$name")
done < <(PYTHONDONTWRITEBYTECODE=1 python3 "$here/steps.py")
((${#all_steps[@]})) || { echo "$here/steps.py tells no steps: is python3 there?" >&2; exit 1; }

usage() {
    echo "usage: run.sh --bundle DIR --out DIR [step…]"
    echo "steps: ${all_steps[*]} (all, in this order, if none is named); README.md tells of more"
}

bundle='' out='' steps=()
while (($#)); do
    case $1 in
        --bundle) bundle=${2-} && shift 2 || { usage >&2; exit 2; } ;;
        --out) out=${2-} && shift 2 || { usage >&2; exit 2; } ;;
        -h | --help) usage; exit 0 ;;
        -*) echo "unknown option $1" >&2; usage >&2; exit 2 ;;
        *)
            [[ -n ${limit_s[$1]-} ]] || { echo "unknown step $1" >&2; usage >&2; exit 2; }
            steps+=("$1")
            shift
            ;;
    esac
done
[[ -d $bundle && -n $out ]] || { usage >&2; exit 2; }
((${#steps[@]})) || steps=("${all_steps[@]}")

mkdir -p "$out"
# Short, for socket paths below it may have 108 bytes.
SUITE_WORK=$(mktemp -d /tmp/tgs-XXXXXX)
# Everything the suite starts carries this in its environment; leftovers are found by it.
TALLY_GPU_SUITE=$SUITE_WORK
export SUITE_WORK TALLY_GPU_SUITE PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
log=$out/suite.log
: >"$log"

sweep() { python3 "$here/procs.py" sweep "$TALLY_GPU_SUITE"; }
cleanup() {
    sweep >/dev/null 2>&1
    rm -rf "$SUITE_WORK"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# The end of every log that a failed step left, in one file.
keep_log_tails() {
    local file
    for file in "$SUITE_WORK/logs/$1"/*; do
        [[ -f $file && $file != *.json ]] || continue
        printf -- '--- %s\n' "${file#"$SUITE_WORK/logs/"}"
        tail -n 60 "$file" | tail -c 12000 | cut -c1-2000
    done >>"$log"
}

results=() failed=0 table=''
for step in "${steps[@]}"; do
    echo "== $step (at most ${limit_s[$step]} s)" | tee -a "$log"
    variable=${step^^}_ARGS
    # Word splitting is what these arguments are for.
    # shellcheck disable=SC2206
    extra=(${!variable-})
    begin=$SECONDS
    # In the background and waited for, so that a signal to this script ends the step at once.
    {
        timeout --kill-after=40 "${limit_s[$step]}" \
            python3 "$here/step_$step.py" --bundle "$bundle" --out "$out" ${extra[@]+"${extra[@]}"} </dev/null
        echo $? >"$SUITE_WORK/code"
    } 2>&1 | tee -a "$log" &
    wait $!
    code=$(cat "$SUITE_WORK/code" 2>/dev/null || echo 1)
    rm -f "$SUITE_WORK/code"
    # Not through a pipe: what stands at its other end would be found too.
    left=$(sweep 2>&1)
    [[ -z $left ]] || echo "$left" | tee -a "$log"
    took=$((SECONDS - begin))
    state=ok
    if ((code == 124 || code == 137)); then state='timed out'; elif ((code)); then state="failed ($code)"; fi
    if ((code)); then
        failed=1
        keep_log_tails "$step"
    fi
    table+=$(printf '%-10s %-14s %5d s' "$step" "$state" "$took")$'\n'
    results+=("{\"step\": \"$step\", \"state\": \"$state\", \"exit\": $code, \"seconds\": $took}")
    # Rewritten after every step, so that an interrupted run still says how far it came.
    (IFS=,; printf '{"steps": [%s]}\n' "${results[*]}") >"$out/suite.json"
done

echo "== summary" | tee -a "$log"
printf '%s' "$table" | tee -a "$log"
echo "results in $out: $(cd "$out" && echo *)"
exit "$failed"
