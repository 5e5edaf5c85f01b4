"""One model on one device: loader, tokenizer, scheduler, KV cache, model runner, sampler, HTTP endpoint."""
