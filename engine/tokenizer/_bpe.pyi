from array import array
from typing import final

@final
class Core:
    last_work: int
    def __init__(
        self,
        *,
        tokens: list[bytes | None],
        left: array[int],
        right: array[int],
        merged: array[int],
        rank: array[int],
        byte_ids: array[int],
        byte_level: bool,
        byte_fallback: bool,
        fuse_unk: bool,
        ignore_merges: bool,
        unk_id: int,
        digits: int,
        split: int,
        max_numbers: int,
        prefix: int,
        meta_replace: bool,
        prefix_text: bytes,
        steps: list[tuple[int, bytes, bytes]],
        raw: list[tuple[bytes, int, int]],
        normalized: list[tuple[bytes, int, int]],
        seed: int,
    ) -> None: ...
    def encode(
        self, text: str, parse_special: bool = True, before: tuple[int, ...] = (), after: tuple[int, ...] = (), /
    ) -> list[int]: ...
    @staticmethod
    def nfc(text: str, /) -> str: ...
    @staticmethod
    def char_flags(code: int, /) -> int: ...
