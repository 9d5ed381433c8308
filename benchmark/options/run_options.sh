#!/usr/bin/env bash
# The runs behind the results in benchmark/options, and from them the tables and figures.
#
#   bash benchmark/options/run_options.sh              # 62 runs of the embedded task
#   bash benchmark/options/run_options.sh --quick      # the same in small: 36 short runs, 2 seeds, 100 posts
#   bash benchmark/options/run_options.sh --dry_run    # prints the commands and does nothing
#   python benchmark/options/options_report.py          # the report on what is there, also while runs go on
#
#   --jobs N           runs at a time, one thread each (default 2)
#   --output_dir DIR   of the runs, <name>__<seed> (default runs/options, with --quick runs/options-quick)
#   --results DIR      of tables and figures (default benchmark/options, with --quick runs/options-quick/results)
#   PYTHON=...         the python to use (default: python)
#
# Repeat the command after an interruption: complete runs are skipped, others continue. Each run has a log beside its
# folder. Runs that fail are named at the end, when the others are done, and the exit status is 1.

set -u
cd "$(dirname "$0")/../.." || exit 1
PYTHON=${PYTHON:-python}
jobs=2 quick= dry_run= output_dir= results=

fail() {
    echo "run_options.sh: $*" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=yes; shift ;;
        --dry_run) dry_run=yes; shift ;;
        --jobs | --output_dir | --results)
            [ $# -gt 1 ] || fail "$1 needs a value"
            eval "${1#--}=\$2"
            shift 2 ;;
        *) fail "unknown flag $1; there are --quick, --jobs, --output_dir, --results, --dry_run" ;;
    esac
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs $jobs: must be a number, at least 1"
command -v "$PYTHON" > /dev/null || fail "PYTHON=$PYTHON: no such program"
output_dir=${output_dir:-runs/options${quick:+-quick}}
if [ -z "$results" ]; then
    [ "$quick" ] && results=$output_dir/results || results=benchmark/options
fi

# ---- The runs. The embedded task with what were its default flags, but for those named. ------------------------------

defaults="--learning_rate 5e-4 --kl_coef 0.05 --per_device_train_batch_size 64 --gradient_accumulation_steps 2"
plan=()  # lines of: group, name, seed, flags
add() {  # group, name, flags: a run for each of $seeds
    local seed
    for seed in $seeds; do
        plan+=("$1 $2 $seed $defaults ${*:3} ${quick:+--total_episodes 1920 --num_eval_prompts 100}")
    done
}

estimators() {
    add estimators rloo --num_sample_generations 4  # the default: everything is compared with it
    add estimators grpo --num_sample_generations 4 --advantage_estimator grpo
    add estimators reinforce --num_sample_generations 4 --advantage_estimator reinforce
}

few="1 2 3" more="4 5"
[ "$quick" ] && few="1 2" more=
seeds=$few
estimators
# With --kl_coef 0 no reference is loaded, so nothing would measure the KL: 1e-9 is 0 to a float's precision.
add kl_coef kl_coef_0 --num_sample_generations 4 --kl_coef 1e-9
add kl_coef kl_coef_0.02 --num_sample_generations 4 --kl_coef 0.02
add kl_coef kl_coef_0.1 --num_sample_generations 4 --kl_coef 0.1
add kl_coef kl_coef_0.3 --num_sample_generations 4 --kl_coef 0.3
add rloo_k rloo_k_2 --num_sample_generations 2 --rloo_k 2
add rloo_k rloo_k_8 --num_sample_generations 2 --rloo_k 8
add reinforce++ kl_level_token --num_sample_generations 2 --kl_level token
add reinforce++ normalize_advantage --num_sample_generations 2 --normalize_advantage
add reinforce++ normalize_reward --num_sample_generations 2 --normalize_reward
add reinforce++ reward_clip_range --num_sample_generations 2 --normalize_reward --reward_clip_range 1
add reinforce++ reinforcepp_all --num_sample_generations 2 --kl_level token --normalize_advantage --normalize_reward \
    --reward_clip_range 1
add loss loss_aggregation_token --num_sample_generations 2 --loss_aggregation token
add loss loss_aggregation_sequence-mean --num_sample_generations 2 --loss_aggregation sequence-mean
add loss no_kl_in_reward --num_sample_generations 2 --no_kl_in_reward
seeds=$more
estimators
# Last, since a factor common to all advantages changes little: the gradient is scaled to its largest norm, and by Adam.
seeds="$few $more"
add estimators drgrpo --num_sample_generations 4 --advantage_estimator drgrpo

# ---- Running them ----------------------------------------------------------------------------------------------------

complete() {  # name__seed: the last line that a run prints is in its log
    grep -q "The policy and its tokenizer: " "$output_dir/$1.log" 2> /dev/null
}

[ "$dry_run" ] || mkdir -p "$output_dir" || exit 1
export OMP_NUM_THREADS=1
trap 'kill $(jobs -rp) 2> /dev/null; wait; echo "run_options.sh: stopped; the same command goes on" >&2; exit 130' INT TERM
planned=
for line in "${plan[@]}"; do
    read -r group name seed flags <<< "$line"
    planned+="$group"$'\t'"$name"$'\t'"$seed"$'\t'"python rloo.py --seed $seed $flags"$'\n'
done
[ "$dry_run" ] || printf %s "$planned" > "$output_dir/plan.tsv"  # what options_report.py goes by
for line in "${plan[@]}"; do
    read -r group name seed flags <<< "$line"
    run=${name}__$seed
    if [ "$dry_run" ]; then
        echo "OMP_NUM_THREADS=1 $PYTHON rloo.py --seed $seed $flags --output_dir $output_dir/$run"
        continue
    fi
    complete "$run" && continue
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do sleep 0.5; done
    echo "$(date +%T) $run: $flags"
    # shellcheck disable=SC2086  # flags are words
    "$PYTHON" rloo.py --seed "$seed" $flags --output_dir "$output_dir/$run" --resume \
        >> "$output_dir/$run.log" 2>&1 < /dev/null &
done
wait
[ "$dry_run" ] && exit 0

failed=
for line in "${plan[@]}"; do
    read -r group name seed flags <<< "$line"
    complete "${name}__$seed" && continue
    failed=yes
    echo "run_options.sh: ${name}__$seed failed: $(tail -n 1 "$output_dir/${name}__$seed.log")" >&2
done
"$PYTHON" benchmark/options/options_report.py --runs "$output_dir" --output_dir "$results" || exit 1
[ -z "$failed" ]
