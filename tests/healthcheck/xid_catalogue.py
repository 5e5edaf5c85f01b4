"""NVIDIA's Xid catalogue as published (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html): the immediate
resolution bucket of each Xid. Typed off from there, not from our policy."""

from __future__ import annotations

BUCKETS: dict[str, list[int]] = {
    "RESTART_APP": [
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 94),
        *range(96, 106),
        *range(126, 136),
        139,
    ],
    "IGNORE": [37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 160, 161],
    "RESET_GPU": [46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158],
    "RESTART_BM": [79],
    "RESTART_VM": [151],
    "CHECK_MECHANICALS": [54],
    "CHECK_UVM": [159],
    "UPDATE_SWFW": [78],
    "WORKFLOW_NVLINK_ERR": [74],
    "WORKFLOW_NVLINK5_ERR": [144, 145, 146, 147, 148, 149, 150],
    "FOLLOW_TEXT": [154],
    "NONE_GIVEN": [162, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172],
}
