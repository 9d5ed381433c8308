#!/usr/bin/env bash
# The TL;DR summarisation benchmark by one command: prepare, train, complete, judge, and the table.
#
#   bash benchmark/tldr/tldr.sh mini                      # the embedded task, minutes on 2 cores
#   bash benchmark/tldr/tldr.sh 1b --dry_run              # prints what it would run, and what that costs
#   bash benchmark/tldr/tldr.sh 410m --seed 2             # goes beside the run of seed 1
#   bash benchmark/tldr/tldr.sh mini --output_dir out -- --total_episodes 1280    # what follows -- goes to rloo.py as well
#
# Presets; all but the first run with --dtype bfloat16 on one GPU:
#   mini    benchmark/mini_tldr, its gold judge (a function)
#   410m    pythia-410m, 131,072 episodes; judge: a reward model of pythia-6.9b, nothing to pay for
#   1b      pythia-1b with TRL's models and settings: k = 2, 2 epochs x 2 mini-batches, 1,000,000 episodes; gpt-4o-mini
#   1b-k4   the same models with k = 4, one epoch, one mini-batch
#
# Options: --seed N; --output_dir DIR (default runs/tldr-PRESET__SEED); --posts N (how many to judge); --judge JUDGE
# (the gold judge, see judge.py); --dry_run. The environment variable PYTHON names the python (default: python).
#
# A step whose output exists is skipped. After an interruption the same command continues: training at its newest
# checkpoint, a language model's judging at its last answer; other steps write complete files only.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
root=$here/../..
mini=$here/../mini_tldr
python=${PYTHON:-python}

fail() { echo "tldr.sh: $*" >&2; exit 1; }

preset=${1:-}
if [[ $preset == --help || $preset == -h ]]; then
    sed -n '/^# The TL;DR/,/^set /p' "${BASH_SOURCE[0]}" | sed -n 's/^# \{0,1\}//p'
    exit
fi
shift || true
seed=1 output='' posts='' judge='' dry_run='' more=()
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

settings="bash benchmark/tldr/tldr.sh $preset --seed $seed${posts:+ --posts $posts}${judge:+ --judge $judge}"
settings+="${more[*]+ -- ${more[*]}}"

# What is trained on what. Where a flag changes only how the work is cut, not the update, it is set for a large GPU.
needs='' marks='' estimate=() hub=trl-internal-testing/tldr-preference-sft-trl-style
gold_6b=model:cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr
tldr=(--missing_eos_penalty 1.0 --stop_token eos --learning_rate 3e-6)
case $preset in
    mini)
        dataset=$mini split=test dtype=float32 batch=64
        posts=${posts:-500} judge=${judge:-function:$mini/mini_tldr.py:gold_judge}
        sft=$mini/sft reward=$mini/reward
        train=(--save_steps 10 --learning_rate 5e-4 --kl_coef 0.05 --per_device_train_batch_size 64
               --gradient_accumulation_steps 2 --total_episodes 6400)
        needs="needs: nothing beyond requirements.txt, 2 GB of memory, under 12 minutes on 2 cores" ;;
    410m)
        dataset=$hub split=validation dtype=bfloat16 batch=512 posts=${posts:-1000} judge=${judge:-$gold_6b}
        sft=mnoukhov/pythia410m-sft-tldr reward=mnoukhov/pythia410m-rm-tldr6.9b
        updates=(--rloo_k 4 --num_ppo_epochs 1 --num_mini_batches 1 --total_episodes 131072)
        train=("${tldr[@]}" "${updates[@]}" --kl_coef 0.05 --per_device_train_batch_size 64
               --gradient_accumulation_steps 8 --save_steps 50)
        estimate=(--body 302.3 --head 51.5 --layers 24 --width 1024 --reward_body 302.3 "${updates[@]}")
        needs="needs: pip install datasets, the network; the gold judge, after training, 14 GB of the GPU's memory" ;;
    1b | 1b-k4)
        dataset=$hub split=validation dtype=bfloat16 batch=256 posts=${posts:-1000} judge=${judge:-openai:gpt-4o-mini}
        sft=cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr reward=cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr
        # 64 x 4 completions per optimizer step are TRL's 16 x 16. TRL's page starts several processes and does not say
        # how many; each adds as many completions to the step. Here it is one process; torchrun starts more.
        updates=(--rloo_k 2 --num_ppo_epochs 2 --num_mini_batches 2 --total_episodes 1000000)
        steps=(--per_device_train_batch_size 64 --gradient_accumulation_steps 4)
        if [[ $preset == 1b-k4 ]]; then  # as many completions per update: 512
            updates=(--rloo_k 4 --num_ppo_epochs 1 --num_mini_batches 1 --total_episodes 1000000)
            steps=(--per_device_train_batch_size 64 --gradient_accumulation_steps 8)
        fi
        train=("${tldr[@]}" "${updates[@]}" "${steps[@]}" --kl_coef 0.03)
        estimate=(--body 805.7 --head 103.0 --layers 16 --width 2048 --reward_body 805.7 "${updates[@]}")
        needs="needs: pip install datasets, the network, OPENAI_API_KEY (or --judge $gold_6b)"
        marks="marks to beat, win rates against the references in %, by the judge that gave them:
  pythia-1b, gpt-4o-mini, 1,000 posts of validation, greedy (TRL's documentation up to 0.19 and its judge_tldr.py):
    SFT 33.0, RLOO 51.2, PPO 63.0 to 64.7. The same RLOO checkpoint: 51.6 by gpt-3.5-turbo-0125, 31.4 by
    Meta-Llama-3-70B-Instruct. So a win rate means something only beside its judge, the order of the pairs, the posts.
  pythia-6.9b, GPT-4 (Ahmadian et al. 2024, arXiv:2402.14740, table 1):
    RLOO k = 4 77.9, RLOO k = 2 74.2, PPO 67.6, DPO 66.6" ;;
    *) fail "name a preset: mini, 410m, 1b or 1b-k4" ;;
esac
[[ $seed =~ ^[0-9]+$ ]] || fail "--seed $seed: must be a number"
[[ $posts =~ ^[1-9][0-9]*$ ]] || fail "--posts $posts: must be a number above 0"
output=${output:-runs/tldr-${preset}__$seed}

echo "TL;DR, $preset, seed $seed, into $output"
echo "$needs"
if ((${#estimate[@]})); then
    "$python" "$here/tldr_steps.py" estimate "${estimate[@]}" --local_rollout_forward_batch_size $batch
fi
if [[ $marks ]]; then echo "$marks"; fi
if [[ ! $dry_run ]]; then
    if [[ $judge == openai:* && ! ${OPENAI_API_KEY:-} && ! ${OPENAI_BASE_URL:-} ]]; then
        fail "the judge $judge needs OPENAI_API_KEY, or name another by --judge"
    fi
    mkdir -p "$output" || fail "--output_dir $output: cannot be made"
    if [[ ! -e $output/settings ]]; then
        echo "$settings" > "$output/settings.unfinished"
        mv "$output/settings.unfinished" "$output/settings"
    fi
    [[ $(< "$output/settings") == "$settings" ]] || fail "--output_dir $output: holds a run of other settings" \
        "($(< "$output/settings")); name another folder"
fi

step() {  # step NAME OUTPUT COMMAND ...: runs the command unless its output exists
    local name=$1 made=$2
    shift 2
    if [[ ! $dry_run && -e $made ]]; then
        echo "== $name: $made exists"
        return
    fi
    echo "== $name"
    printf '%q ' "$@"
    echo
    if [[ ! $dry_run ]]; then "$@"; fi
}

complete() {  # complete NAME MODEL FLAGS ...
    local name=$1 model=$2
    shift 2
    step "complete: $name" "$output/$name.jsonl" "$python" "$here/complete.py" --sft_model_path "$model" \
        --dataset_name "$output/data" --dataset_test_split $split --posts "$posts" --dtype $dtype --seed "$seed" \
        --local_rollout_forward_batch_size $batch --output "$output/$name.jsonl" "$@"
}

splits=(train $split)
step prepare "$output/data" "$python" "$here/tldr_steps.py" prepare --dataset_name "$dataset" --splits "${splits[@]}" \
    --output "$output/data"

if [[ $preset == mini ]]; then judged_by=(--judge_fn "$mini/mini_tldr.py:gold_judge"); else judged_by=(); fi
step train "$output/policy" "$python" "$root/rloo.py" --dataset_name "$output/data" --dataset_test_split $split \
    --sft_model_path "$sft" --reward_model_path "$reward" --dtype $dtype --local_rollout_forward_batch_size $batch \
    "${train[@]}" ${judged_by[@]+"${judged_by[@]}"} --seed "$seed" --output_dir "$output/training" --resume \
    ${more[@]+"${more[@]}"}
if [[ ! $dry_run && ! -e $output/policy ]]; then
    mv "$output/training" "$output/policy"
    echo "now in $output/policy"
fi

complete sft-greedy "$sft"
complete sft-samples "$sft" --temperature 0.7 --n 4
complete rloo-greedy "$output/policy"
complete rloo-sampled "$output/policy" --temperature 0.7
step "best of 4" "$output/best-of-4.jsonl" "$python" "$here/tldr_steps.py" best_of --completions "$output/sft-samples.jsonl" \
    --reward_model_path "$reward" --dtype $dtype --output "$output/best-of-4.jsonl"

files=()
for name in sft-greedy sft-samples best-of-4 rloo-greedy rloo-sampled; do files+=("$output/$name.jsonl"); done
step "judge: gold" "$output/gold.json" "$python" "$here/judge.py" --completions "${files[@]}" --judge "$judge" \
    --dtype $dtype --output "$output/gold.json"
step "judge: the reward model of the training" "$output/reward.json" "$python" "$here/judge.py" \
    --completions "${files[@]}" --judge "model:$reward" --dtype $dtype --output "$output/reward.json"
step table "$output/table.txt" "$python" "$here/tldr_steps.py" table --runs "$output" --output "$output/table.txt"
if [[ ! $dry_run ]]; then echo && cat "$output/table.txt"; fi
