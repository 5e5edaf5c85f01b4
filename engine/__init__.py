"""One model on one device: loader, tokenizer, scheduler, KV cache, model runner, sampler, HTTP endpoint."""

__version__ = "0.1.0"
"""Of the whole distribution (appliance.__version__ and pyproject.toml take it from here)."""
