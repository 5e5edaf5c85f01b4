"""Make smollm2_forced.npz: what transformers thinks at each of 20 x 512 positions of SmolLM2-135M-Instruct (float32).

    python tests/golden/make_smollm2_forced.py MODEL_DIR     # as `appliance model pull smollm2` leaves it

A backend that computes in bfloat16 cannot give transformers' float32 logits; it must give the same argmax wherever the
best token is far enough ahead of the second. So what is stored is, per position: the token id that is fed
(teacher forcing), the argmax, and the gap between the two best logits.

The texts are the 20 prompts of smollm2_prompts.py, continued by the model itself to 512 tokens: sampled at temperature
1 by inverse CDF with numpy's PCG64 (seed SEED), so anybody can make the same ones. How large a gap bfloat16 can turn
around is measured, not guessed: transformers runs the same texts with weights and the inputs of every matrix product
rounded to bfloat16 (products and sums stay float32, as on a tensor core), and `bf16_gap_change` is the largest change
of (logit of the float32 argmax - best other logit) that makes at any position.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from golden_file import HERE, script_sha256
from smollm2_prompts import PROMPTS

LENGTH = 512
SEED = 20


@torch.inference_mode()
def continue_texts(model: Any, prompts: list[list[int]]) -> np.ndarray:
    """(20, LENGTH) token ids: each prompt, then what the model says. All in one batch, one position a step."""
    rng = np.random.default_rng(SEED)
    ids = np.zeros((len(prompts), LENGTH), np.int64)
    cache = transformers.DynamicCache(config=model.config)
    logits = None
    for position in range(LENGTH):
        draws = rng.random(len(prompts))
        for row, prompt in enumerate(prompts):
            if position < len(prompt):
                ids[row, position] = prompt[position]
                continue
            assert logits is not None
            weights = np.exp(logits[row] - logits[row].max())
            ids[row, position] = np.searchsorted(np.cumsum(weights), draws[row] * weights.sum(), side="right")
        out = model(torch.from_numpy(ids[:, position : position + 1]), cache=cache, use_cache=True)
        logits = out.logits[:, -1].double().numpy()
        if position % 64 == 63:
            print(f"position {position}", flush=True)
    return ids


@torch.inference_mode()
def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(ids[None]), use_cache=False).logits[0].float().numpy()


def round_to_bf16(model: Any) -> Any:
    """Weights and inputs of every matrix product to bfloat16 and back."""

    def rounded(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0].bfloat16().float(), *inputs[1:])

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.weight.data = module.weight.data.bfloat16().float()
    return model


def lead(logits: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Logit of `best` less the best other logit, per row."""
    rows = np.arange(len(logits))
    mine = logits[rows, best]
    others = logits.copy()
    others[rows, best] = -np.inf
    return mine - others.max(axis=1)


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    directory = Path(sys.argv[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    model = load()
    prompts = []
    for _name, prompt in PROMPTS:
        text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True
        )  # fmt: skip
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"][: LENGTH // 2])
    ids = continue_texts(model, prompts)
    print("texts made", flush=True)
    rough = round_to_bf16(load())
    argmax, gaps, changes, agree = np.empty_like(ids), np.empty(ids.shape, np.float32), [], 0
    for row, text in enumerate(ids):
        exact = logits_of(model, text)
        argmax[row] = exact.argmax(axis=1)
        gaps[row] = lead(exact, argmax[row])
        other = logits_of(rough, text)
        agree += int((other.argmax(axis=1) == argmax[row]).sum())
        changes.append(np.abs(lead(other, argmax[row]) - gaps[row]))
        print(
            f"{PROMPTS[row][0]:18} median gap {np.median(gaps[row]):.3f}  {tokenizer.decode(text[-40:])!r}", flush=True
        )
    change = np.concatenate(changes)
    meta = {
        "made_by": "tests/golden/make_smollm2_forced.py",
        "script_sha256": script_sha256(__file__),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dtype": "float32",
        "device": "cpu",
        "attention": "eager",
        "bf16_gap_change": float(change.max()),
        "bf16_gap_change_p99": float(np.percentile(change, 99)),
        "bf16_agreement": agree / ids.size,
    }
    print(json.dumps(meta, indent=1))
    np.savez_compressed(
        HERE / "smollm2_forced.npz",
        token_ids=ids.astype(np.uint16),
        argmax=argmax.astype(np.uint16),
        gap=gaps.astype(np.float16),
        meta=np.array(json.dumps(meta)),
    )


if __name__ == "__main__":
    main()
