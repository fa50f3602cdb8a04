"""Distinguishes a lack of memory from all other errors of a device. After it the device is well, and what needed the memory can be
given up or tried again; after most others of a GPU only a new process can use it.

Only torch's own allocator for GPUs raises torch.OutOfMemoryError. The driver, Triton and cuBLAS take memory of their own, on the
device and on the host (page-locked memory, kernels that are loaded at their first launch, work spaces). A lack of it is a
RuntimeError that says so in its text, and so is a lack of host memory for torch's tensors.
"""

from __future__ import annotations

# The first is in "CUDA out of memory", "CUDA error: out of memory" and "Triton Error [CUDA]: out of memory"; the second in errors
# of torch's allocator for the host; the third in errors of cuBLAS (its documentation, cublasStatus_t: CUBLAS_STATUS_ALLOC_FAILED).
_TEXTS = ("out of memory", "can't allocate memory", "alloc_failed")


def lacks_memory(error: Exception) -> bool:
    """Returns whether an error of Python, torch, Triton or the driver is a lack of memory."""
    text = str(error).partition("\n")[0].lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(part in text for part in _TEXTS))
