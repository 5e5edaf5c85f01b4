"""Our own BPE tokenizer, read from tokenizer.json; ids equal to the `tokenizers` library (spec.py says what is known)."""

from engine.tokenizer.tokenizer import Detokenizer, Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
