"""The shared memory to add to a kernel's blocks, so that an SM holds only a given number of them. Imports no torch."""

from __future__ import annotations

# Every GPU since compute capability 8.0 has these: the bytes that the hardware keeps for each
# block, and the pieces in which it gives out shared memory. A block may have the rest of an SM's.
_RESERVED_BYTES = 1 << 10
_GRANULE_BYTES = 128
MOST_CTAS = 32  # that an SM holds


def smem_pad_bytes(shared_bytes: int, ctas_per_sm: int, sm_bytes: int) -> int:
    """As ``plan.templates.smem_pad_bytes``; the least multiple of the 128 bytes in which the hardware gives shared memory out.

    Threads and registers may leave room for fewer blocks. Other kernels have the rest of the SM's memory.
    """
    if type(ctas_per_sm) is not int or not 1 <= ctas_per_sm <= MOST_CTAS:
        raise ValueError(f"ctas_per_sm is {ctas_per_sm!r}, allowed are 1 to {MOST_CTAS}")
    if type(shared_bytes) is not int or shared_bytes < 0:
        raise ValueError(f"shared_bytes is {shared_bytes!r}, allowed is an integer of 0 or more")

    def taken(padding: int) -> int:
        return -(-(shared_bytes + padding + _RESERVED_BYTES) // _GRANULE_BYTES) * _GRANULE_BYTES

    if ctas_per_sm * taken(0) > sm_bytes:
        raise ValueError(
            f"ctas_per_sm is {ctas_per_sm}, allowed are 1 to {sm_bytes // taken(0)}, as blocks of {shared_bytes} bytes share "
            f"an SM's {sm_bytes}"
            if taken(0) <= sm_bytes
            else f"shared_bytes is {shared_bytes}, allowed are 0 to {sm_bytes - _RESERVED_BYTES}, what a block may have"
        )
    # One block more must not fit: the first granule beyond its share of the SM.
    least = (sm_bytes // (ctas_per_sm + 1) // _GRANULE_BYTES + 1) * _GRANULE_BYTES
    if least <= taken(0):
        return 0
    if ctas_per_sm * least > sm_bytes:
        raise ValueError(
            f"ctas_per_sm is {ctas_per_sm}: no padding leaves room for exactly {ctas_per_sm} blocks of {shared_bytes} bytes on "
            f"an SM with {sm_bytes} bytes; take fewer"
        )
    return least - _RESERVED_BYTES - shared_bytes
