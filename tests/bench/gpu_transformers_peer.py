"""Speed of Hugging Face transformers on this GPU, compiled with CUDA graphs: the peer of our CUDA engine.

    python tests/bench/gpu_transformers_peer.py [--batches 1 32] [--prompt-tokens 512] [--budget 240]

Llama-3-8B shape, bf16, random weights, static cache, `torch.compile(mode="reduce-overhead")`. Decode: median step at
`prompt-tokens` of context. Prefill: median of one forward pass with the logits of the last position only, compiled too
(first batch size in --prefills; others eager when `budget` seconds are used up, and the result says which).
Needs torch and transformers; prints one JSON line.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from typing import Any

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


def median_ms(torch: Any, prepare: Any, function: Any, repeats: int) -> float:
    """Of `function`, by CUDA events, after three unmeasured calls; `prepare` goes before each and is not measured."""
    for _ in range(3):
        prepare()
        function()
    times = []
    for _ in range(repeats):
        prepare()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(sorted(times)[len(times) // 2])


class Peer:
    def __init__(self) -> None:
        import torch
        import transformers

        self.torch, self.transformers = torch, transformers
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**LLAMA_8B, dtype="bfloat16")
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            self.model = transformers.LlamaForCausalLM(config).eval()
        names = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
        self.new_names = "cache" in names
        self.takes_cache_position = "cache_position" in names
        self.compiled = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)

    def cache(self, batch: int, length: int) -> Any:
        cache = self.transformers.StaticCache(config=self.model.config, max_cache_len=length)
        config = self.model.config
        cache.early_initialization(  # outside the compiled region, as transformers' own generate does
            batch, config.num_key_value_heads, config.hidden_size // config.num_attention_heads,
            self.torch.bfloat16, self.torch.device("cuda"),
        )  # fmt: skip
        return cache

    def run(self, forward: Any, cache: Any, tokens: Any, positions: Any) -> Any:
        """One forward pass; argument names moved between transformers 5.17 and 5.24."""
        arguments: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1, "position_ids": positions[None]}
        arguments["cache" if self.new_names else "past_key_values"] = cache
        if self.takes_cache_position:
            arguments["cache_position"] = positions
        return forward(tokens, **arguments).logits

    def decode_ms(self, batch: int, prompt_tokens: int) -> float:
        torch = self.torch
        cache = self.cache(batch, prompt_tokens + 128)
        prompt = torch.randint(5, 128000, (batch, prompt_tokens), device="cuda")
        self.run(self.model.forward, cache, prompt, torch.arange(prompt_tokens, device="cuda"))
        token = torch.randint(5, 128000, (batch, 1), device="cuda")
        position = torch.tensor([prompt_tokens], device="cuda")

        def step() -> None:
            logits = self.run(self.compiled, cache, token, position)
            token.copy_(logits[:, -1].argmax(-1, keepdim=True))
            position.add_(1)

        return median_ms(torch, torch.compiler.cudagraph_mark_step_begin, step, 30)

    def prefill_ms(self, batch: int, prompt_tokens: int, compiled: bool) -> float:
        torch = self.torch
        prompt = torch.randint(5, 128000, (batch, prompt_tokens), device="cuda")
        positions = torch.arange(prompt_tokens, device="cuda")
        cache = self.cache(batch, prompt_tokens)
        forward = self.compiled if compiled else self.model.forward

        def prepare() -> None:
            cache.reset()
            torch.compiler.cudagraph_mark_step_begin()

        return median_ms(torch, prepare, lambda: self.run(forward, cache, prompt, positions), 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--prefills", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds; what is not begun by then is left out")
    args = parser.parse_args()
    try:
        peer = Peer()
    except ImportError as error:
        print(json.dumps({"bench": "gpu_transformers_peer", "error": str(error)}))
        return 3
    torch, started = peer.torch, time.monotonic()
    result: dict[str, Any] = {
        "bench": "gpu_transformers_peer", "torch": torch.__version__, "transformers": peer.transformers.__version__,
        "prompt_tokens": args.prompt_tokens, "decode_tokens_per_second": {}, "prefill_ms": {}, "left_out": [],
    }  # fmt: skip
    with torch.inference_mode():
        for kind, batch in [*(("decode", b) for b in args.batches), *(("prefill", b) for b in args.prefills)]:
            if time.monotonic() - started > args.budget:
                result["left_out"].append(f"{kind} {batch}")
                continue
            try:
                if kind == "decode":
                    ms = peer.decode_ms(batch, args.prompt_tokens)
                    result["decode_tokens_per_second"][batch] = round(batch / ms * 1e3, 1)
                else:
                    eager = peer.prefill_ms(batch, args.prompt_tokens, compiled=False)
                    compiled = peer.prefill_ms(batch, args.prompt_tokens, compiled=True)
                    result["prefill_ms"][batch] = {"compiled": round(compiled, 2), "eager": round(eager, 2)}
            except Exception as error:  # the peer's own trouble is reported, not hidden
                result["left_out"].append(f"{kind} {batch}: {type(error).__name__}: {str(error)[:300]}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
