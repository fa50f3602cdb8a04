"""Tells a lack of memory from all other errors of a GPU. After it the device is well, and what needed the memory can be given up or
tried again; after most others only a new process can use the device.

Only torch's own allocator raises torch.OutOfMemoryError. The driver, Triton and cuBLAS take memory of their own, on the device and
on the host (page-locked memory, kernels that are loaded at their first launch, work spaces), and a lack of it is a RuntimeError
that says so in its text.
"""

from __future__ import annotations

# The first is in "CUDA out of memory", "CUDA error: out of memory" and "Triton Error [CUDA]: out of memory", the second in errors
# of cuBLAS (cuBLAS documentation, cublasStatus_t: CUBLAS_STATUS_ALLOC_FAILED).
_TEXTS = ("out of memory", "alloc_failed")


def lacks_memory(error: RuntimeError) -> bool:
    """Returns whether an error of torch, Triton or the driver is a lack of memory."""
    text = str(error).partition("\n")[0].lower()
    return any(part in text for part in _TEXTS)
