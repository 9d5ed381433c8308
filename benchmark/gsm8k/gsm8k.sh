#!/usr/bin/env bash
# RLOO on GSM8K with verifiable rewards: a completion is scored by its answer, not by a model (gsm8k_reward.py).
#
#   bash benchmark/gsm8k/gsm8k.sh mini                    # mini GSM8K: tuning, seeds and report; 1 to 1.5 hours of a CPU core
#   bash benchmark/gsm8k/gsm8k.sh mini --quick            # the same in small: 3 minutes
#   bash benchmark/gsm8k/gsm8k.sh qwen3-0.6b              # Qwen3-0.6B on GSM8K: one GPU and the network
#   bash benchmark/gsm8k/gsm8k.sh qwen3-0.6b --dry_run    # only prints the commands
#
# After mini, flags of gsm8k_mini.py may follow, after qwen3-0.6b those of rloo.py. From the environment: OUT
# (runs/gsm8k), PYTHON (python), for qwen3-0.6b SEEDS ("1"). Repeat the command after an interruption: what is finished is
# skipped, an interrupted run continues.
set -euo pipefail
cd "$(dirname "$0")/../.."
preset=${1:-}
shift || true
out=${OUT:-runs/gsm8k}
python=${PYTHON:-python}
if [ "$preset" = mini ]; then exec "$python" benchmark/gsm8k/gsm8k_mini.py --output_dir "$out/mini" "$@"; fi
dry_run=
flags=()
for flag in "$@"; do
    if [ "$flag" = --dry_run ]; then dry_run=1; else flags+=("$flag"); fi
done
rewards=benchmark/gsm8k/gsm8k_reward.py

# --judge_fn is `correctness` alone, so judge_score is the accuracy on the held-out problems.
common=(--reward_fns $rewards:correctness $rewards:format --reward_weights 1.0 0.2 --judge_fn $rewards:correctness
        --rloo_k 8 --temperature 1.0 --save_steps 50 --save_total_limit 1 --resume)

case $preset in
qwen3-0.6b)
    # Not run yet; starting points, not tuned. Each update: 32 problems with 8 completions of up to 1024 tokens; in all
    # one pass over the 7,473 problems. Install: requirements.txt, datasets. Estimates, counted and not measured:
    # 50 GB of GPU memory (weights, gradients and Adam's moments in float32 10, keys and values of 256 completions 30 in
    # decoding, activations of 16 completions 24 in training; half of --local_rollout_forward_batch_size halves the one,
    # --gradient_checkpointing saves most of the other) and an hour on an H100 at 250 tokens per completion, most of it
    # for decoding, which goes on until the longest completion of an update ends.
    seeds=${SEEDS:-1}
    settings=(--dataset_name "$out/data" --sft_model_path Qwen/Qwen3-0.6B --dtype bfloat16
              --response_length 1024 --max_prompt_length 512 --num_eval_prompts 1319
              --local_rollout_forward_batch_size 256 --per_device_train_batch_size 16 --gradient_accumulation_steps 16
              --total_episodes 59784 --learning_rate 1e-6 --warmup_ratio 0.05 --kl_coef 0.01)
    ;;
*)
    echo "gsm8k.sh: which preset, mini or qwen3-0.6b? For instance: bash benchmark/gsm8k/gsm8k.sh mini" >&2
    exit 2
    ;;
esac

run() {
    printf '%q ' "$@"
    echo
    if [ -z "$dry_run" ]; then "$@"; fi
}

# GSM8K's question becomes a chat, its answer ("... #### 42") stays. Qwen3 thinks for thousands of tokens before it
# answers, unless the system turn says /no_think.
prepare() {
    "$python" - "$1" <<'END'
import json, os, sys
sys.path.insert(0, "benchmark/gsm8k")
from gsm8k_reward import chat
try:
    import datasets
except ImportError:
    sys.exit("gsm8k.sh: openai/gsm8k is read by the datasets package: pip install datasets")
for split in ("train", "test"):
    path = os.path.join(sys.argv[1], split + ".jsonl")
    os.makedirs(sys.argv[1], exist_ok=True)
    with open(path + ".part", "w", encoding="utf-8") as file:
        for row in datasets.load_dataset("openai/gsm8k", "main", split=split):
            prompt = chat(row["question"])
            prompt[0]["content"] += " /no_think"
            file.write(json.dumps({"prompt": prompt, "answer": row["answer"]}) + "\n")
    os.replace(path + ".part", path)
END
}

if [ ! -f "$out/data/test.jsonl" ]; then  # the split that is written last
    echo "# openai/gsm8k -> $out/data/train.jsonl, $out/data/test.jsonl"
    if [ -z "$dry_run" ]; then prepare "$out/data"; fi
fi
for seed in $seeds; do
    folder=$out/$preset/seed-$seed
    if [ -f "$folder/model.safetensors" ]; then  # written at the end
        echo "# $folder is done"
    else
        run "$python" rloo.py "${common[@]}" "${settings[@]}" --seed "$seed" --output_dir "$folder" \
            ${flags[@]+"${flags[@]}"}
    fi
done
run "$python" benchmark/gsm8k/gsm8k_report.py "$out/$preset"
