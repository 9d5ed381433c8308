"""Which models of transformers can rloo.py train, and which of them in group rows?

    python benchmark/models/model_types.py                # every decoder-only model type that can be built small: 5 min
    python benchmark/models/model_types.py llama qwen3    # some
    python benchmark/models/model_types.py --device cuda  # on a GPU, where the decoder records its steps

Builds each with random weights, in float32, and compares plain and group rows with the model alone, which reads a
prompt and one completion without padding: log-probs, their gradient, and what is sampled, past two doublings of the
decoder's cache. What fails in plain rows must be refused by rloo.check_model, and what is in GROUP_MODELS of rloo.py
must pass in group rows; the command fails if not. Vision-language models and those of bytes are left out.
"""

import argparse
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

K, T, TEMPERATURE = 3, 10, 0.7
PROMPTS = [[5, 17, 42, 8, 30, 61, 9], [77, 12, 50]]  # the second is padded
STOPS = list(range(40, 50))  # a tenth of the vocabulary
CLOSE = 5e-5  # largest difference of log-probs, in nats, that is rounding
CLOSE_GRADIENT = 5e-4  # and of a gradient, relative to its norm

# Settings, for configurations that have a field of the name: small sizes, windows that are longer than the rows, and
# scales of logits that are 1 by default in some models.
SMALL = {"vocab_size": 100, "vocab_size_per_layer_input": 100, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
SMALL |= dict.fromkeys(["hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "hidden_size_per_layer_input"], 32)
SMALL |= dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], 2)
SMALL |= dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4)
SMALL |= dict.fromkeys(["intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "dff", "dim_ff"], 64)
SMALL |= dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32)
SMALL |= dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4)
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SMALL |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
SMALL |= {"max_position_embeddings": 128, "n_positions": 128, "initializer_range": 0.2, "rotary_dim": 4}
SMALL |= dict.fromkeys(["sliding_window", "attention_chunk_size", "attention_window_size"], 64)
SMALL |= {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_chunk_size": 8}
SMALL |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SMALL |= {"linear_head_dim": 8, "linear_num_heads": 4}
SMALL |= {"logits_scaling": 3.0, "logit_scale": 0.4, "final_logit_softcapping": 2.0, "lm_head_multiplier": 0.5}
SMALL |= {"residual_multiplier": 0.7, "embedding_multiplier": 2.0, "attention_multiplier": 0.5}
OWN = {  # what these do not build, and layers that only some models of a type have
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4, "num_layers": 1},
    "mamba2": {"head_dim": 16, "num_heads": 4, "n_groups": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "mpt": {"logit_scale": None},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xlstm": {"mode": "train", "chunk_size": 1},
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def decoder_only() -> list[str]:
    """Model types of AutoModelForCausalLM, without those that are an encoder, too, and of more than text."""
    encoders = (
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )
    encoders |= modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    several = {"text_config", "vision_config", "patcher_config", "audio_encoder_config", "decoder"}
    types = []
    for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = CONFIG_MAPPING[name]
        other = name in encoders or kind.model_type != name  # gpt-sw3 is a gpt2
        if not other and not several & getattr(kind, "sub_configs", {}).keys():
            types.append(name)
    return types


def small_model(model_type: str, **settings):
    """A model of the type with random weights, as transformers makes it."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    names = default.to_dict().keys() | getattr(default, "attribute_map", {}).keys()
    settings = {name: x for name, x in SMALL.items() if name in names} | OWN.get(model_type, {}) | settings
    for name in ("layer_types", "mlp_layer_types"):  # one of each kind
        kinds = sorted(set(getattr(default, name, None) or ()))
        if kinds and name in default.to_dict() and name not in settings:
            settings[name] = (kinds * 2)[: max(2, len(kinds))]
            settings["num_hidden_layers"] = max(settings["num_hidden_layers"], len(kinds))
    if "qk_rope_head_dim" in settings:  # it determines the size of a head
        if model_type not in OWN:
            settings.pop("head_dim", None)
        settings["num_key_value_heads"] = 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():  # none stays 0 or 1
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def logits_alone(model, prompt: list[int], completion: list[int]):
    """Of the model itself: those that predict the tokens of the completion, (n, vocabulary)."""
    return model(torch.tensor([prompt + completion], device=model.device)).logits[0, len(prompt) - 1 : -1].float()


def logprobs_alone(model, batch):
    """(k, B, T), 0 where masked."""
    logprobs = torch.zeros(batch.responses.shape, device=model.device)
    for j, b in torch.cartesian_prod(torch.arange(K), torch.arange(len(PROMPTS))):
        ids = batch.responses[j, b][batch.response_mask[j, b]]
        logits = logits_alone(model, PROMPTS[b], ids.tolist())
        own = (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
        logprobs = logprobs.index_put((j, b, torch.arange(len(ids))), own)
    return logprobs


def gradient(model, logprobs):
    """Of a sum of the log-probs with random weights."""
    factors = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1)).to(logprobs)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    parts = torch.autograd.grad((factors * logprobs).sum(), weights, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def random_batch(device):
    """Random completions that end early, late or never."""
    tokens = torch.randint(50, 100, (K, len(PROMPTS), T), generator=torch.Generator().manual_seed(0))
    tokens[0, 0, 3] = tokens[1, 1, 8] = tokens[2, 1, 0] = STOPS[0]
    return rloo.make_batch([{"prompt_ids": ids} for ids in PROMPTS], tokens.to(device), STOPS)


def distances(model, layout: str, batch, expected, expected_gradient) -> dict[str, float]:
    """How far what rloo.py computes and samples in a layout is from the model alone."""
    kernel = model.config._attn_implementation
    model.layout = layout
    if layout == "group":
        model.set_attn_implementation(rloo.GROUP_KERNEL)
    logprobs, _ = rloo.completion_logprobs(model, batch, TEMPERATURE)
    found = {"log-probs": (logprobs - expected).abs().max()}
    found["gradient"] = (gradient(model, logprobs) - expected_gradient).norm() / expected_gradient.norm()
    args = rloo.Args(response_length=T, device=str(model.device))
    with mock.patch.object(rloo, "FIRST_SLOTS", 4):
        sampled, sampler_logprobs = rloo.rollout(args, model, batch.examples, K, TEMPERATURE, STOPS)
        greedy, _ = rloo.rollout(args, model, batch.examples, K, 0.0, STOPS)
    model.set_attn_implementation(kernel)  # that of the model alone
    with torch.no_grad():
        found["sampling"] = (sampler_logprobs - logprobs_alone(model, sampled)).abs().max()
        for b, prompt in enumerate(PROMPTS):
            ids = greedy.responses[0, b][greedy.response_mask[0, b]]
            logits = logits_alone(model, prompt, ids.tolist())
            short = (logits.max(-1).values - logits.gather(1, ids[:, None]).squeeze(1)).max()
            found["greedy tokens"] = max(short, found.get("greedy tokens", short))
    return {name: x.item() for name, x in found.items()}


def fault(model, layout: str, *expected) -> str:
    """Why a model fails in a layout; empty if it passes."""
    if layout == "group" and model.config._attn_implementation != "sdpa":
        return f"its kernel is {model.config._attn_implementation}"
    try:
        found = distances(model, layout, *expected)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0][:90]
    limits = {name: CLOSE_GRADIENT if name == "gradient" else CLOSE for name in found}
    if layout == "plain":  # a hybrid's own cache is less exact, by up to 0.002; what check_gap allows is no fault
        limits["sampling"] = 0.01
    return ", ".join(f"{name} {x:.1g} off" for name, x in found.items() if not x < limits[name])


def compare(model) -> dict[str, str]:
    """Layout -> fault; and at `start` what check_model says."""
    batch = random_batch(model.device)
    expected = logprobs_alone(model, batch)
    expected = batch, expected.detach(), gradient(model, expected)
    found = {"start": ""}
    try:
        rloo.check_model(model, PROMPTS, len(PROMPTS[0]) + T)
    except Exception as error:
        found["start"] = f"refused, {type(error).__name__}"
    return found | {layout: fault(model, layout, *expected) for layout in ("plain", "group")}


def main(names: list[str], device: str):
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    kinds = defaultdict(list)
    wrong = []
    for name in names or decoder_only():
        try:
            model = small_model(name).to(device)
            found = compare(model)
        except Exception as error:
            kinds["not built"].append(name)
            print(f"{name:22} not built, {type(error).__name__}: {str(error):.90}", flush=True)
            continue
        print(
            f"{name:22}",
            *(f"{what} rows: {found[what] or 'ok'};" for what in ("group", "plain")),
            found["start"],
            flush=True,
        )
        kind = "refused" if found["plain"] else "plain rows only"
        if not (found["plain"] or found["group"]):
            kind = "group rows" if name in rloo.GROUP_MODELS else "group rows, but not in GROUP_MODELS"
        kinds[kind].append(name)
        if bool(found["plain"]) != bool(found["start"]):
            wrong.append(
                f"{name}: plain rows {found['plain'] or 'ok'}, but at the start {found['start'] or 'accepted'}"
            )
        if name in rloo.GROUP_MODELS and found["group"]:
            wrong.append(f"{name}: is in GROUP_MODELS")
    print(f"\ntransformers {transformers.__version__}, torch {torch.__version__}")
    for kind, types in kinds.items():
        print(f"{kind}, {len(types)}: {', '.join(types)}")
    sys.exit("\n".join(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; none: all")
    parser.add_argument("--device", default="cpu")
    main(**vars(parser.parse_args()))
