"""Is rloo.py right on your device, and for your model?

    python benchmark/check.py                           # tiny models, then short runs of rloo.py and each extension
    python benchmark/check.py --model MODEL             # a folder or Hub id: may it run with --layout group?
    python benchmark/check.py --types all               # every decoder-only model type of transformers: 5 minutes
    python benchmark/check.py --types llama falcon      # some

Compares what rloo.py computes and samples, in both layouts, with the model alone, which reads a prompt and a completion
without padding: log-probs, their gradient, the sampler's log-probs, and greedy tokens. For each layout it prints what a
run would do with the model:

ok       trains it, and all is right
refused  ends at the start, by rloo.check_model
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import runs
import torch
import transformers
import tyro
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

import rloo

K, T, TEMPERATURE = 3, 10, 0.7
MANY = 32  # completions per prompt for check_sampler
STOPS = list(range(40, 50))  # of small models: a tenth of the vocabulary
# Largest differences: of log-probs, in nats; of a gradient, relative to its norm.
CLOSE = {"float32": {"log-probs": 5e-5, "gradient": 5e-4, "sampling": 5e-5, "greedy tokens": 5e-5}}
CLOSE["bfloat16"] = {"log-probs": 0.2, "gradient": 0.2, "sampling": 0.2, "greedy tokens": 0.2}
# The cache of a hybrid, with which plain rows sample, is less exact; what check_sampler allows is no fault.
PLAIN = {"sampling": 0.01}

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


def logits_alone(model, prompt: list[int], completion: list[int]):
    """Returns the model's own logits (n, vocabulary) for the tokens of the completion."""
    return model(torch.tensor([prompt + completion], device=model.device)).logits[0, len(prompt) - 1 : -1].float()


def logprobs_alone(model, batch):
    """Returns the model's own log-probs (k, B, T), 0 where masked."""
    logprobs = torch.zeros(batch.responses.shape, device=model.device)
    for row, ids in enumerate(batch.completion_ids()):
        j, b = divmod(row, len(batch.examples))
        logits = logits_alone(model, batch.examples[b]["prompt_ids"], ids) / TEMPERATURE
        own = logits.log_softmax(-1).gather(1, torch.tensor(ids, device=model.device)[:, None])[:, 0]
        logprobs = logprobs.index_put((torch.tensor(j), torch.tensor(b), torch.arange(len(ids))), own)
    return logprobs


def gradient(model, logprobs):
    """Returns the gradient of a sum of the log-probs with random factors."""
    factors = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1)).to(logprobs)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    parts = torch.autograd.grad((factors * logprobs).sum(), weights, allow_unused=True, materialize_grads=True)
    return torch.cat([part.float().flatten() for part in parts])


@contextmanager
def in_layout(model, layout: str):
    """Gives the model the attention that --layout gives it, for a while."""
    kernel = model.config._attn_implementation
    if layout == "group":
        model.set_attn_implementation(rloo.GROUP_KERNEL)
    try:
        yield
    finally:
        model.set_attn_implementation(kernel)


def distances(model, layout: str, batch, stops, expected, expected_gradient) -> dict[str, float]:
    """Returns how far what rloo.py computes and samples in a layout is from the model alone."""
    with in_layout(model, layout):
        logprobs, _ = rloo.completion_logprobs(model, batch, TEMPERATURE)
        found = {"log-probs": (logprobs - expected).abs().max()}
        found["gradient"] = (gradient(model, logprobs) - expected_gradient).norm() / expected_gradient.norm()
        args = rloo.Args(response_length=batch.responses.shape[-1], device=str(model.device))
        with mock.patch.object(rloo, "FIRST_SLOTS", 4):  # so that the decoder's cache is doubled twice
            sampled, sampler_logprobs = rloo.rollout(args, model, batch.examples, K, TEMPERATURE, stops)
            greedy, _ = rloo.rollout(args, model, batch.examples, K, 0.0, stops)
    with torch.no_grad():
        found["sampling"] = (sampler_logprobs - logprobs_alone(model, sampled)).abs().max()
        short = []
        for example, ids in zip([*batch.examples] * K, greedy.completion_ids()):
            logits = logits_alone(model, example["prompt_ids"], ids)
            short.append((logits.max(-1).values - logits[range(len(ids)), ids]).max())
        found["greedy tokens"] = max(short)
    return {name: x.item() for name, x in found.items()}


def refusal(model, layout: str, batch, stops) -> str:
    """Returns what a run would say of the model, by check_model or by check_sampler; empty if it would train it."""
    args = rloo.Args(response_length=T, layout=layout, local_rollout_forward_batch_size=2 * MANY)
    try:
        ours = partial(rloo.chunked_logprobs, model, temperature=TEMPERATURE, chunk_size=4)
        theirs = partial(rloo.logprobs_alone, temperature=TEMPERATURE)
        stage = "refused"
        rloo.check_model(args, model, batch.examples, ours, theirs)
        stage = "ends"
        sampled, sampler_logprobs = rloo.rollout(args, model, batch.examples, MANY, TEMPERATURE, stops)
        logprobs = rloo.chunked_logprobs(model, sampled, TEMPERATURE, 2 * MANY)
        rloo.check_sampler((sampler_logprobs - logprobs)[sampled.policy_mask])
    except rloo.InputError:
        return stage
    except Exception as error:
        return f"error, {type(error).__name__}: {str(error).partition(chr(10))[0][:60]}"
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
    dtype = str(model.dtype).removeprefix("torch.")
    found = {}
    for layout in ("group", "plain"):
        limits = dict(CLOSE[dtype])
        if layout == "plain":
            limits |= {name: max(x, limits[name]) for name, x in PLAIN.items()}
        if layout == "group" and model.config._attn_implementation != "sdpa":
            found[layout] = f"refused: its kernel is {model.config._attn_implementation}"  # by read_model
            continue
        with in_layout(model, layout):
            verdict = refusal(model, layout, batch, stops)
        try:
            expected = logprobs_alone(model, batch)
            off = distances(model, layout, batch, stops, expected.detach(), gradient(model, expected))
            faults = ", ".join(f"{name} {x:.1g} off" for name, x in off.items() if not x < limits[name])
        except Exception as error:
            faults = f"{type(error).__name__}: {error}".partition("\n")[0][:60]
            verdict = verdict or "error"
        verdict = verdict or ("WRONG" if faults else "ok")
        found[layout] = f"{verdict}: {faults}" if faults else verdict
    return found


# ---- Runs ------------------------------------------------------------------------------------------------------------

SKIPPED = {"turns.py": "needs a tool", "vllm_rollout.py": "needs vLLM", "fsdp.py": "needs torchrun"}


def short_run(script: Path, device: str) -> str:
    """Returns why two updates by a script fail, empty if they do not."""
    flags = "--sft_model_path benchmark/mini_tldr/sft --reward_model_path benchmark/mini_tldr/reward --dtype bfloat16 "
    flags += "--dataset_name benchmark/mini_tldr/validation.jsonl --response_length 8 --num_eval_prompts 2 "
    flags += "--per_device_train_batch_size 16 --total_episodes 32 --num_sample_generations 0 --learning_rate 1e-2"
    if script.name == "advantages.py":
        flags += " --advantages raft"
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, script, *flags.split(), "--device", device, "--output_dir", f"{folder}/out"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=runs.ROOT)
        kls = [abs(update["val/rollout_kl"]) for update in runs.lines(Path(folder, "out", "metrics.jsonl"))]
    if done.returncode:
        return done.stderr[-1500:]
    return "" if len(kls) == 2 and max(kls) < 0.05 else f"val/rollout_kl {kls}"


def runs_of_scripts(device: str):
    """Yields name and why a short run fails, of rloo.py and of each extension that can be run like it."""
    scripts = [runs.ROOT / "rloo.py"]
    for script in sorted(runs.HERE.glob("extensions/*.py")):
        if "rloo.command_line(" in script.read_text(encoding="utf-8") and not script.name.endswith("_test.py"):
            scripts.append(script)
    scripts = [script for script in scripts if script.name not in SKIPPED]
    with ThreadPoolExecutor(1 if device == "cpu" else 8) as pool:
        faults = pool.map(partial(short_run, device=device), scripts)
        yield from zip((script.name for script in scripts), faults)


def main(types: tuple[str, ...] = (), model: str = "", device: str | None = None):
    """Checks; see above.

    Args:
        types: model types of transformers, or all
        model: a folder or Hub id
        device: Default: cuda if there is one
    """
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    device = rloo.resolve_args(rloo.Args(device=device)).device
    rloo.start_processes(torch.device(device))
    failed, verdicts = [], {"group": Counter(), "plain": Counter()}
    names = [model] if model else decoder_only() if types == ("all",) else types or ("llama", "gpt_neox")
    for name, dtype in itertools.product(names, ["float32"] if types else ["float32", "bfloat16"]):
        try:
            wanted = getattr(torch, dtype)
            if model:
                tried = rloo.read_model(rloo.Args(device=device, dtype=dtype, layout="plain"), model, wanted)
            else:
                tried = small_model(name, wanted, device)
            torch.manual_seed(1)
            found = compare(tried.requires_grad_(True), longest=256 if model else 7)
        except Exception as error:
            found = {"not built": f"{type(error).__name__}: {error}".partition("\n")[0][:90]}
        for layout in found.keys() & verdicts.keys():
            verdicts[layout][found[layout].partition(":")[0].partition(",")[0]] += 1
        if any(text.startswith("WRONG") for text in found.values()) or (model and "not built" in found):
            failed.append(name)
        print(f"{name}, {dtype}", *(f"{layout}: {text}" for layout, text in found.items()), sep="  ", flush=True)
    if not (model or types):
        for name, fault in runs_of_scripts(device):
            print(f"{name}, two updates: {fault or 'ok'}", flush=True)
            failed.extend([name] if fault else [])
        print(*(f"{name}: skipped, {why}" for name, why in SKIPPED.items()), sep="\n")
    for layout, counts in verdicts.items():
        print(f"{layout} rows: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    print(f"{len(failed)} failed {failed}; {versions}, {name}, rloo.py {runs.provenance()['rloo.py']}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    tyro.cli(main)
