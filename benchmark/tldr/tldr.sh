#!/usr/bin/env bash
# The TL;DR summarisation benchmark by one command: train, complete the test posts before and after, judge.
#
#   bash benchmark/tldr/tldr.sh 1b-k4 --dry_run           # prints what it would run
#   bash benchmark/tldr/tldr.sh 410m --seed 2             # goes beside the run of seed 1
#   bash benchmark/tldr/tldr.sh mini -- --total_episodes 640    # what follows -- goes to rloo.py as well
#
# Presets; all but the last run with --dtype bfloat16 on one GPU:
#   410m    pythia-410m, 131,072 episodes; judge: a reward model of pythia-6.9b, nothing to pay for
#   1b      pythia-1b with TRL's models and settings: k = 2, 2 epochs x 2 mini-batches, 1,000,000 episodes; gpt-4o-mini
#   1b-k4   the same models with k = 4, one epoch, one mini-batch
#   mini    the embedded task with its gold judge, on a CPU, to try the script
#
# Options: --seed N; --output_dir DIR (default runs/tldr-PRESET__SEED); --posts N (how many to judge, default 1000);
# --judge JUDGE (see judge.py); --dry_run. The environment variable PYTHON names the python (default: python).
#
# A step whose output exists is skipped. After an interruption the same command continues: training at its newest
# checkpoint, a language model's judging at its last answer; other steps write complete files only.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
mini=$here/../mini_tldr
python=${PYTHON:-python}

fail() { echo "tldr.sh: $*" >&2; exit 1; }

preset=${1:-}
shift || true
seed=1 output='' posts=1000 judge='' dry_run='' more=()
while (($#)); do
    case $1 in
        --dry_run) dry_run=1; shift ;;
        --seed | --output_dir | --posts | --judge)
            (($# > 1)) || fail "$1: needs a value"
            case $1 in --seed) seed=$2 ;; --output_dir) output=$2 ;; --posts) posts=$2 ;; --judge) judge=$2 ;; esac
            shift 2 ;;
        --) shift; more=("$@"); break ;;
        *) fail "$1: there is no such option; see the top of $0" ;;
    esac
done

# What is trained on what. Where a flag changes only how the work is cut, not the update, it is set for a large GPU.
dataset=trl-internal-testing/tldr-preference-sft-trl-style split=validation dtype=bfloat16 batch=256
train=(--missing_eos_penalty 1.0 --stop_token eos --learning_rate 3e-6)
case $preset in
    410m)
        sft=mnoukhov/pythia410m-sft-tldr reward=mnoukhov/pythia410m-rm-tldr6.9b
        judge=${judge:-model:cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr}
        train+=(--rloo_k 4 --kl_coef 0.05 --total_episodes 131072 --per_device_train_batch_size 64
                --gradient_accumulation_steps 8 --save_steps 50) ;;
    1b | 1b-k4)
        sft=cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr reward=cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr
        judge=${judge:-openai:gpt-4o-mini}
        # 512 completions per update. 64 x 4 per optimizer step are TRL's 16 x 16. TRL's page starts several processes and
        # does not say how many; each adds as many completions to the step. Here it is one process; torchrun starts more.
        train+=(--kl_coef 0.03 --total_episodes 1000000 --per_device_train_batch_size 64)
        if [[ $preset == 1b ]]; then
            train+=(--rloo_k 2 --num_ppo_epochs 2 --num_mini_batches 2 --gradient_accumulation_steps 4)
        else
            train+=(--rloo_k 4 --gradient_accumulation_steps 8)
        fi ;;
    mini)
        dataset=$mini split=test dtype=float32 batch=64 sft=$mini/sft reward=$mini/reward
        judge=${judge:-function:$mini/mini_tldr.py:gold_judge}
        train=(--total_episodes 6400 --learning_rate 2.5e-4 --kl_coef 0.02 --per_device_train_batch_size 32
               --gradient_accumulation_steps 1) ;;
    *) fail "name a preset: 410m, 1b, 1b-k4 or mini" ;;
esac
[[ $seed =~ ^[0-9]+$ && $posts =~ ^[1-9][0-9]*$ ]] || fail "--seed and --posts must be numbers"
output=${output:-runs/tldr-${preset}__$seed}
if [[ ! $dry_run && $judge == openai:* && ! ${OPENAI_API_KEY:-} && ! ${OPENAI_BASE_URL:-} ]]; then
    fail "the judge $judge needs OPENAI_API_KEY, or name another by --judge"
fi

step() {  # step OUTPUT COMMAND ...: runs the command unless its output exists
    local made=$1
    shift
    if [[ ! $dry_run && -e $made ]]; then
        echo "== $made exists"
        return
    fi
    printf '%q ' "$@"
    echo
    if [[ ! $dry_run ]]; then "$@"; fi
}

complete() {  # complete NAME MODEL FLAGS ...
    local name=$1 model=$2
    shift 2
    step "$output/$name.jsonl" "$python" "$here/complete.py" --sft_model_path "$model" --dataset_name "$dataset" \
        --dataset_test_split $split --posts "$posts" --dtype $dtype --seed "$seed" \
        --local_rollout_forward_batch_size $batch --output "$output/$name.jsonl" "$@"
}

step "$output/training/model.safetensors" "$python" "$here/../../rloo.py" --dataset_name "$dataset" \
    --dataset_test_split $split --sft_model_path "$sft" --reward_model_path "$reward" --dtype $dtype \
    --local_rollout_forward_batch_size $batch "${train[@]}" --seed "$seed" --output_dir "$output/training" --resume \
    ${more[@]+"${more[@]}"}
files=()
for policy in sft rloo; do
    model=$sft
    if [[ $policy == rloo ]]; then model=$output/training; fi
    complete $policy-greedy "$model"
    complete $policy-sampled "$model" --temperature 0.7
    files+=("$output/$policy-greedy.jsonl" "$output/$policy-sampled.jsonl")
done
for name in gold reward; do
    if [[ $name == reward ]]; then judge=model:$reward; fi
    step "$output/$name.json" "$python" "$here/judge.py" --completions "${files[@]}" --judge "$judge" --dtype $dtype \
        --output "$output/$name.json"
done
