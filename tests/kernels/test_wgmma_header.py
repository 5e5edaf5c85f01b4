"""kernels/wgmma.cuh is what its generator writes: nobody edits the header by hand and loses it at the next run."""

from pathlib import Path

from kernels import gen_wgmma


def test_header_is_generated() -> None:
    assert Path(gen_wgmma.__file__).with_name("wgmma.cuh").read_text() == gen_wgmma.text()
