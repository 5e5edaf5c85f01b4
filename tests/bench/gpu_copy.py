"""Copy bandwidth of this GPU: device to device, 4 GiB, bytes read plus bytes written, best of 10 by CUDA events.

The ceiling that decode speeds are compared with (tests/bench/gpu.py). Prints one JSON line.
"""

from __future__ import annotations

import json

from tests.gpu.device import Gpu

BYTES = 4 << 30


def main() -> None:
    gpu = Gpu()
    cuda, stream = gpu.context.cuda, gpu.context.compute
    source, target = cuda.mem_alloc(BYTES), cuda.mem_alloc(BYTES)
    cuda.memset_d32(source, 0x3F803F81, BYTES // 4)
    milliseconds = []
    for _ in range(10):
        begin, end = cuda.Event(), cuda.Event()
        begin.record(stream)
        cuda.memcpy_dtod_async(target, source, BYTES, stream)
        end.record(stream)
        end.synchronize()
        milliseconds.append(begin.time_till(end))
    source.free()
    target.free()
    gpu.close()
    print(
        json.dumps(
            {"bench": "gpu_copy", "milliseconds": milliseconds, "bytes_per_second": 2e3 * BYTES / min(milliseconds)}
        )
    )


if __name__ == "__main__":
    main()
