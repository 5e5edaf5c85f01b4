"""The device layer: everything that talks to the CUDA driver, and nothing else does.

Imported only when the CUDA backend was asked for. Only engine/cuda/driver.py imports PyCUDA and cuda-bindings.

Start, in call order: driver.load_driver -> context.DeviceContext -> module.Kernels -> memory.plan_memory ->
memory.DeviceMemory -> loader.WeightLoader.load -> executor.CudaExecutor (a step) -> graphs.GraphCache (a captured
step). End: DeviceContext.close, which closes all that was opened on it, last first.
"""
