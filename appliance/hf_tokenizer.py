"""tokenizer.json and tokenizer_config.json from the tokenizer inside a GGUF file.

GGUF keeps vocabulary, merges, token types and chat template, but names the pre-tokenizer by a word only
(`tokenizer.ggml.pre`). Known words are listed here with the rule they stand for; any other is refused, because a wrong
rule gives wrong token ids without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from appliance.gguf import GgufError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp, enum llama_token_type

_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    # SmolLM and SmolLM2 (Hugging Face's tokenizer.json): single digits, then the split rule of GPT-2.
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def tokenizer_files(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"tokenizer.json": ..., "tokenizer_config.json": ...} for a byte-level BPE tokenizer; `config` is config.json."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise GgufError(
            f"tokenizer {model!r} with pre-tokenizer {pre!r} cannot be converted; known: 'gpt2' with {known}"
        )
    if metadata.get("tokenizer.ggml.add_bos_token", False) or metadata.get("tokenizer.ggml.add_eos_token", False):
        raise GgufError("a tokenizer that adds BOS or EOS by itself cannot be converted")
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise GgufError("tokenizer.ggml.add_space_prefix is set, which a byte-level tokenizer cannot do")
    tokens = _tokens(metadata, config["vocab_size"])
    added = _added_tokens(metadata, tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(metadata, vocab),
        },
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(metadata, config, tokens, added)}


def _tokens(metadata: Mapping[str, Any], vocab_size: int) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise GgufError("tokenizer.ggml.tokens is missing or no list of strings")
    if len(tokens) != vocab_size or len(set(tokens)) != vocab_size:
        raise GgufError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, {len(set(tokens))} of them different; "
            f"the model has {vocab_size}"
        )
    return tokens


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> list[dict[str, Any]]:
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise GgufError("tokenizer.ggml.token_type is missing or not as long as the vocabulary")
    unknown = set(types.tolist()) - {_NORMAL, _CONTROL, _USER_DEFINED}
    if unknown:
        raise GgufError(
            f"tokenizer.ggml.token_type has the types {sorted(unknown)}, which byte-level BPE does not have"
        )
    return [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, kind in enumerate(types.tolist())
        if kind != _NORMAL
    ]


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[str]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise GgufError("tokenizer.ggml.merges is missing or no list")
    for index, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else []
        if len(parts) != 2 or any(part not in vocab for part in (*parts, "".join(parts))):
            raise GgufError(f"merge {index} of tokenizer.ggml.merges, {merge!r}, does not join two tokens to a third")
    return merges


def _tokenizer_config(
    metadata: Mapping[str, Any], config: Mapping[str, Any], tokens: list[str], added: list[dict[str, Any]]
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"} for entry in added
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "GPT2Tokenizer",
        "vocab_size": config["vocab_size"],
    }
    for key, gguf_key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get(f"tokenizer.ggml.{gguf_key}_token_id")
        if token_id is not None:
            if type(token_id) is not int or not 0 <= token_id < len(tokens):
                raise GgufError(f"tokenizer.ggml.{gguf_key}_token_id is {token_id!r}, outside the vocabulary")
            result[f"{key}_token"] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise GgufError("tokenizer.chat_template is not a string")
        result["chat_template"] = template
    return result
