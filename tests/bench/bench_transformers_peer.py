"""Speed of Hugging Face transformers on this CPU (float32, batch 1): the peer of our CPU backend. Prints one JSON line.

    python tests/bench/bench_transformers_peer.py --model DIR_OR_GGUF [--prompt-tokens 128] [--new-tokens 64] [--runs 5]

Needs torch and transformers (tests/golden/requirements.txt), best in a virtual environment of its own; without them it
says so and exits 3. Prefill: one forward pass over the prompt, logits of the last position only. Decode: greedy steps
with transformers' cache, its first step not counted (it is the prefill). Medians over the runs, after one unmeasured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face style directory, or a .gguf file")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores allowed")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    arguments = parser.parse_args()
    if not arguments.model.exists():
        parser.error(f"{arguments.model} does not exist")
    if min(arguments.prompt_tokens, arguments.runs, arguments.threads) < 1 or arguments.new_tokens < 2:
        parser.error("prompt-tokens, runs and threads must be at least 1, new-tokens at least 2")
    return arguments


def load(path: Path, attention: str) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()


def one_run(model: Any, prompt: Any, new_tokens: int) -> tuple[float, float]:
    """Seconds of the prefill, and seconds of each of the new_tokens - 1 decode steps after it (median)."""
    import torch
    import transformers

    with torch.inference_mode():
        cache = transformers.DynamicCache(config=model.config)
        began = time.perf_counter()
        token = model(prompt, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].argmax()
        prefill = time.perf_counter() - began
        steps = []
        for _ in range(new_tokens - 1):
            began = time.perf_counter()
            token = model(token.view(1, 1), cache=cache, use_cache=True).logits[0, -1].argmax()
            steps.append(time.perf_counter() - began)
    return prefill, statistics.median(steps)


def main() -> int:
    arguments = parse_arguments()
    try:
        import torch
        import transformers
    except ImportError as error:
        print(json.dumps({"bench": "transformers_peer", "error": f"{error}; see tests/golden/requirements.txt"}))
        return 3
    torch.set_num_threads(arguments.threads)
    busy = os.getloadavg()[0]
    model = load(arguments.model, arguments.attention)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, model.config.vocab_size, (1, arguments.prompt_tokens), generator=generator)
    runs = [one_run(model, prompt, arguments.new_tokens) for _ in range(arguments.runs + 1)][1:]
    prefill, step = (statistics.median(values) for values in zip(*runs))
    result = {
        "bench": "transformers_peer",
        "decode_tokens_per_second": round(1 / step, 2),
        "prefill_tokens_per_second": round(arguments.prompt_tokens / prefill, 1),
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "runs": arguments.runs,
        "threads": arguments.threads,
        "load_average_before": round(busy, 2),  # well above 0: others shared the cores, the figures are too low
        "dtype": "float32",
        "attention": arguments.attention,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
