#!/usr/bin/env bash
# RLOO on GSM8K with verifiable rewards: a completion is scored by its answer, not by a model (gsm8k_reward.py).
#
#   bash benchmark/gsm8k/gsm8k.sh              # Qwen3-0.6B on GSM8K: one GPU and the network; never run yet
#   bash benchmark/gsm8k/gsm8k.sh --dry_run    # only prints the commands; other flags go to rloo.py
#
# From the environment: OUT (runs/gsm8k), PYTHON (python), SEEDS ("1"). Repeat the command after an interruption: what is
# finished is skipped, an interrupted run continues.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-runs/gsm8k}
python=${PYTHON:-python}
dry_run='' flags=()
for flag in "$@"; do
    if [ "$flag" = --dry_run ]; then dry_run=1; else flags+=("$flag"); fi
done
rewards=benchmark/gsm8k/gsm8k_reward.py

# Starting points, not tuned. Each update: 32 problems with 8 completions of up to 1024 tokens; in all one pass over the
# 7,473 problems. --judge_fn is `correctness` alone, so judge_score is the accuracy on the held-out problems.
settings=(--dataset_name "$out/data" --sft_model_path Qwen/Qwen3-0.6B --dtype bfloat16
          --reward_fns $rewards:correctness $rewards:format --reward_weights 1.0 0.2 --judge_fn $rewards:correctness
          --rloo_k 8 --temperature 1.0 --response_length 1024 --max_prompt_length 512 --num_eval_prompts 1319
          --local_rollout_forward_batch_size 256 --per_device_train_batch_size 16 --gradient_accumulation_steps 16
          --total_episodes 59784 --learning_rate 1e-6 --warmup_ratio 0.05 --kl_coef 0.01
          --save_steps 50 --save_total_limit 1 --resume)

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
for seed in ${SEEDS:-1}; do
    folder=$out/qwen3-0.6b/seed-$seed
    if [ -f "$folder/model.safetensors" ]; then  # written at the end
        echo "# $folder is done"
        continue
    fi
    printf '%q ' "$python" rloo.py "${settings[@]}" --seed "$seed" --output_dir "$folder" ${flags[@]+"${flags[@]}"}
    echo
    if [ -z "$dry_run" ]; then
        "$python" rloo.py "${settings[@]}" --seed "$seed" --output_dir "$folder" ${flags[@]+"${flags[@]}"}
    fi
done
