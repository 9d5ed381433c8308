"""Is rloo.py right on your device, and for your model?

    python benchmark/check.py                           # tiny models, then short runs of rloo.py and extensions
    python benchmark/check.py --model MODEL             # a folder or Hub id: may it run with --layout group?
    python benchmark/check.py --types all               # every decoder-only model type of transformers: 5 minutes
    python benchmark/check.py --types llama falcon      # some

Compares what rloo.py computes and samples, in both layouts, with the model alone, which reads a prompt and a completion
without padding: log-probs, their gradient, the sampler's log-probs, and greedy tokens. For each layout it prints what a
run would do with the model:

ok       trains it, and all is right
refused  ends at the start, by rloo.check_policy
ends     ends before the first step, by rloo.check_sampler
error    ends with an error
WRONG    trains it, though something is wrong

Status 1 says that something is WRONG, that --model cannot be checked, or that a short run has failed.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter

import runs
import torch
import torch.nn.functional as F
import transformers
import tyro
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

import rloo

K, T, TEMPERATURE = 3, 10, 0.7
MANY = 32  # completions per prompt for check_sampler
STOPS = list(range(40, 50))  # of small models: a tenth of the vocabulary
# Largest differences in float32: of log-probs, in nats; of a gradient, relative to its norm.
CLOSE = {"log-probs": 5e-5, "gradient": 5e-4, "sampling": 5e-5, "greedy tokens": 5e-5}

# Settings of small models: for all types that have a field of the name (small sizes, windows longer than the rows, and
# scales of logits that are 1 by default in some models), and for types that need others.
SMALL = json.loads(runs.HERE.joinpath("records", "model_types.json").read_text())


# ---- Models ----------------------------------------------------------------------------------------------------------


def decoder_only() -> list[str]:
    """Returns the types of AutoModelForCausalLM that are neither encoders as well nor models of more than text."""
    encoders = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    encoders |= modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    several = {"text_config", "vision_config", "patcher_config", "audio_encoder_config", "decoder"}
    types = []
    for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = CONFIG_MAPPING[name]
        other = name in encoders or kind.model_type != name  # gpt-sw3 is a gpt2
        if not other and not several & getattr(kind, "sub_configs", {}).keys():
            types.append(name)
    return types


def small_model(model_type: str, dtype=torch.float32, device="cpu"):
    """Returns a model of the type with random weights, none of which stays 0 or 1."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    names = default.to_dict().keys() | getattr(default, "attribute_map", {}).keys()
    settings = {name: x for name, x in SMALL["all"].items() if name in names} | SMALL["own"].get(model_type, {})
    for name in ("layer_types", "mlp_layer_types"):  # one of each kind
        kinds = sorted(set(getattr(default, name, None) or ()))
        if kinds and name in default.to_dict() and name not in settings:
            settings[name] = (kinds * 2)[: max(2, len(kinds))]
            settings["num_hidden_layers"] = max(settings["num_hidden_layers"], len(kinds))
    if "qk_rope_head_dim" in settings:  # it determines the size of a head
        if model_type not in SMALL["own"]:
            settings.pop("head_dim", None)
        settings["num_key_value_heads"] = 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.to(device, dtype)


# ---- A model in both layouts against itself --------------------------------------------------------------------------


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:90]


def logits_alone(model, prompt: list[int], completion: list[int]):
    """Returns the model's own logits (n, vocabulary) for the tokens of the completion."""
    return model(torch.tensor([prompt + completion], device=model.device)).logits[0, len(prompt) - 1 : -1].float()


def logprobs_alone(model, batch):
    """Returns the model's own log-probs (k, B, T), 0 where masked."""
    rows = []
    for example, ids in zip([*batch.examples] * K, batch.completion_ids()):
        logits = logits_alone(model, example["prompt_ids"], ids) / TEMPERATURE
        logprobs = logits.log_softmax(-1)[range(len(ids)), ids]
        rows.append(F.pad(logprobs, (0, T - len(ids))))
    return torch.stack(rows).view(batch.responses.shape)


def gradient(model, logprobs):
    """Returns the gradient of a sum of the log-probs with random factors."""
    factors = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1)).to(logprobs)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    parts = torch.autograd.grad((factors * logprobs).sum(), weights, allow_unused=True, materialize_grads=True)
    return torch.cat([part.float().flatten() for part in parts])


def distances(model, args, batch, stops) -> dict[str, float]:
    """Returns how far what rloo.py computes and samples is from the model alone."""
    logprobs, _ = rloo.completion_logprobs(model, batch, TEMPERATURE)
    ours = gradient(model, logprobs)
    sampled, sampler_logprobs = rloo.rollout(args, model, batch.examples, K, TEMPERATURE, stops)
    greedy, _ = rloo.rollout(args, model, batch.examples, K, 0.0, stops)
    expected = logprobs_alone(model, batch)
    theirs = gradient(model, expected)
    with torch.no_grad():
        short = []
        for example, ids in zip([*batch.examples] * K, greedy.completion_ids()):
            logits = logits_alone(model, example["prompt_ids"], ids)
            short.append((logits.max(-1).values - logits[range(len(ids)), ids]).max().item())
        return {
            "log-probs": (logprobs - expected).abs().max().item(),
            "gradient": ((ours - theirs).norm() / theirs.norm()).item(),
            "sampling": (sampler_logprobs - logprobs_alone(model, sampled)).abs().max().item(),
            "greedy tokens": max(short),
        }


def refusal(model, args, examples, stops) -> str:
    """Returns how check_policy or check_sampler would end a run with the model; empty if the run would train it."""
    stage = "refused"
    try:
        rloo.check_policy(args, model, pair=examples)
        stage = "ends"
        sampled, sampler_logprobs = rloo.rollout(args, model, examples, MANY, TEMPERATURE, stops)
        logprobs = rloo.logprobs_in_parts(args, model, sampled)
        rloo.check_sampler((sampler_logprobs - logprobs)[sampled.policy_mask])
    except rloo.InputError:
        return stage
    return ""


def compare(model, longest: int = 7) -> dict[str, str]:
    """Returns for each layout what a run would do with the model, and what is wrong."""
    vocabulary, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    stops = STOPS if vocabulary == 100 else list(range(0, vocabulary, 64))
    ids = torch.randint(50, vocabulary, (longest + 4,), generator=generator).tolist()
    prompts = [ids[:longest], ids[: longest // 2 + 1]]  # the second is padded
    tokens = torch.randint(50, vocabulary, (K, 2, T), generator=generator)
    tokens[0, 0, 3] = tokens[1, 1, 8] = tokens[2, 1, 0] = stops[0]  # completions end early, late or never
    batch = rloo.make_batch([{"prompt_ids": ids} for ids in prompts], tokens.to(model.device), stops)
    found = {}
    for layout in ("group", "plain"):
        model.layout = layout
        args = rloo.Args(response_length=T, layout=layout, local_rollout_forward_batch_size=2 * MANY)
        limits = CLOSE if layout == "group" else CLOSE | {"sampling": 0.01}  # the cache of a hybrid is less exact
        if model.dtype == torch.bfloat16:
            limits = dict.fromkeys(CLOSE, 0.2)
        verdict = ""
        try:
            verdict = refusal(model, args, batch.examples, stops)
            off = distances(model, args, batch, stops)
            faults = ", ".join(f"{name} {x:.1g} off" for name, x in off.items() if not x < limits[name])
        except Exception as error:
            verdict, faults = verdict or "error", first_line(error)
        verdict = verdict or ("WRONG" if faults else "ok")
        found[layout] = f"{verdict}: {faults}" if faults else verdict
    return found


# ---- Runs ------------------------------------------------------------------------------------------------------------

SCRIPTS = ["rloo.py", "benchmark/extensions/advantages.py --advantages raft"]
for name in ("correction", "entropy", "grpo", "lora", "truncate", "value"):  # others need a tool, vLLM or torchrun
    SCRIPTS.append(f"benchmark/extensions/{name}.py")


def short_run(script: str, device: str) -> str:
    """Returns why two updates by a script fail, empty if they do not. A sampler unlike the policy ends a run."""
    flags = "--sft_model_path benchmark/mini_tldr/sft --reward_model_path benchmark/mini_tldr/reward --dtype bfloat16 "
    flags += "--dataset_name benchmark/mini_tldr/validation.jsonl --response_length 8 --num_eval_prompts 2 "
    flags += "--per_device_train_batch_size 16 --total_episodes 32 --num_sample_generations 0 --learning_rate 1e-2"
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *script.split(), *flags.split(), "--device", device, "--output_dir", f"{folder}/out"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=runs.ROOT)
    return done.stderr[-1500:] if done.returncode else ""


def main(types: tuple[str, ...] = (), model: str = ""):
    """Checks; see above.

    Args:
        types: model types of transformers, or all
        model: a folder or Hub id
    """
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    args = rloo.resolve_args(rloo.Args(layout="plain"))
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in rloo.main
    failed, counts = [], Counter()
    names = [model] if model else decoder_only() if types == ("all",) else types or ("llama", "gpt_neox")
    for name, dtype in itertools.product(names, [torch.float32] if types else [torch.float32, torch.bfloat16]):
        try:
            tried = rloo.read_model(args, model, dtype) if model else small_model(name, dtype, args.device)
            torch.manual_seed(1)
            found = compare(tried.requires_grad_(True), longest=256 if model else 7)
        except Exception as error:
            found = {"not built": first_line(error)}
        if any(text.startswith("WRONG") for text in found.values()) or (model and "not built" in found):
            failed.append(name)
        counts.update(f"{layout} {text.partition(':')[0]}" for layout, text in found.items())
        print(f"{name}, {dtype}", *(f"{layout}: {text}" for layout, text in found.items()), sep="  ", flush=True)
    for script in [] if model or types else SCRIPTS:
        fault = short_run(script, args.device)
        print(f"{script}, two updates: {fault or 'ok'}", flush=True)
        failed += [script] if fault else []
    print(", ".join(f"{verdict} {count}" for verdict, count in counts.most_common()))
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{len(failed)} failed {failed}; {versions}, {device}, rloo.py {runs.provenance()['rloo.py']}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    tyro.cli(main)
