"""Our own BPE tokenizer, read from tokenizer.json; ids equal to those of the `tokenizers` library."""

from engine.tokenizer.tokenizer import Detokenizer, Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
