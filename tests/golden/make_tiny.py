"""Make tiny_*.npz: logits of Hugging Face transformers (float32, CPU, attn_implementation="eager") for tiny_models.py.

Run from the repository root, in a virtual environment of its own (tests/golden/requirements.txt):
    python tests/golden/make_tiny.py [name ...]

The values are one forward pass over the whole prompt. Dynamic rope scaling is the exception: transformers rotates every
position with a base computed from the longest sequence seen so far, so past max_position_embeddings its logits of a
prompt depend on how the prompt was cut, and on what the same model object saw before. A fresh model is made for each
prompt, and prompts past the limit are stored twice: "whole", and "stepwise" (one token at a time: position p is rotated
with the base of length p + 1, the only one of these that an engine with chunked prefill and a prefix cache can follow).

Before a file is written the script asserts that the values are worth comparing with at 1e-4: eager and sdpa attention,
and whole and stepwise passes, agree ten times better; every alternative config moves the logits by 100 times more.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from golden_file import HERE, Golden, GoldenPrompt, random_columns, relative_error, script_sha256
from tiny_models import TINY_MODELS, VOCAB, make_tiny, prompt_ids

STABLE, SENSITIVE = 1e-5, 1e-2


def load(directory: Path, attention: str, **config_changes: Any) -> Any:
    """A fresh model of `directory` in float32; config_changes are applied to its config.json."""
    config = json.loads((directory / "config.json").read_text())
    config.update(config_changes)
    if config_changes:
        original = (directory / "config.json").read_text()
        (directory / "config.json").write_text(json.dumps(config))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=attention
        )
    finally:
        if config_changes:
            (directory / "config.json").write_text(original)
    return model.eval()


@torch.inference_mode()
def whole(model: Any, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


@torch.inference_mode()
def stepwise(model: Any, ids: list[int], size: int = 1) -> np.ndarray:
    """`size` tokens at a time, with transformers' cache."""
    cache = transformers.DynamicCache(config=model.config)
    pieces = [torch.tensor([ids[start : start + size]]) for start in range(0, len(ids), size)]
    return torch.cat([model(piece, cache=cache, use_cache=True).logits[0] for piece in pieces]).numpy()


def make(name: str, directory: Path) -> Golden:
    spec = TINY_MODELS[name]
    sha256 = make_tiny(name, directory)
    limit = spec.config["max_position_embeddings"] if name == "rope_dynamic" else None
    columns = random_columns(name, VOCAB, spec.columns)
    golden = Golden({}, columns)
    sdpa_gap = stepwise_gap = 0.0
    for length in spec.prompt_lengths:
        ids = prompt_ids(name, length)
        full = sorted({*range(0, length, spec.full_every), length - 1})
        logits = whole(load(directory, "eager"), ids)
        steps = stepwise(load(directory, "eager"), ids, 1 if length < 1000 else 500)
        sdpa_gap = max(sdpa_gap, relative_error(whole(load(directory, "sdpa"), ids), logits))
        golden.prompts.append(GoldenPrompt.from_logits(ids, logits, columns, full, 0))
        if limit is None or length <= limit:
            stepwise_gap = max(stepwise_gap, relative_error(steps, logits))
        else:
            golden.prompts.append(GoldenPrompt.from_logits(ids, steps, columns, full, 0, "stepwise"))
    longest = prompt_ids(name, spec.prompt_lengths[-1])
    reference = whole(load(directory, "eager"), longest)
    moved = {
        label: relative_error(whole(load(directory, "eager", **copy.deepcopy(changes)), longest), reference)
        for label, changes in spec.alternatives.items()
    }
    assert sdpa_gap < STABLE and stepwise_gap < STABLE, (name, sdpa_gap, stepwise_gap)
    assert all(gap > SENSITIVE for gap in moved.values()), (name, moved)
    spread = float(reference.std(axis=1).mean())
    golden.meta = {
        "model": name,
        "num_prompts": len(golden.prompts),
        "weights_sha256": sha256,
        "made_by": "tests/golden/make_tiny.py",
        "script_sha256": script_sha256(__file__),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dtype": "float32",
        "device": "cpu",
        "attention": "eager",
        "eager_vs_sdpa": sdpa_gap,
        "whole_vs_stepwise": stepwise_gap,
        "moved_by": moved,
        "logit_std": spread,
        "attention_entropy_share": attention_entropy(directory, longest),
    }
    return golden


@torch.inference_mode()
def attention_entropy(directory: Path, ids: list[int]) -> float:
    """Mean over heads of the last position's attention entropy / log(n): 1 = uniform, near 0 = one token."""
    attentions = load(directory, "eager")(torch.tensor([ids]), output_attentions=True).attentions
    last = torch.stack([layer[0, :, -1] for layer in attentions])
    entropy = -(last * last.clamp_min(1e-30).log()).sum(-1) / np.log(len(ids))
    return float(entropy.mean())


def main() -> None:
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in sys.argv[1:] or TINY_MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            golden = make(name, Path(scratch) / name)
        path = HERE / f"tiny_{name}.npz"
        golden.save(path)
        meta = golden.meta
        print(
            f"{name:28} {path.stat().st_size / 1e3:6.1f} kB  eager/sdpa {meta['eager_vs_sdpa']:.1e}  "
            f"whole/steps {meta['whole_vs_stepwise']:.1e}  logit std {meta['logit_std']:.2f}  "
            f"entropy {meta['attention_entropy_share']:.2f}  moved by "
            + ", ".join(f"{label} {gap:.2f}" for label, gap in meta["moved_by"].items()),
            f" sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
