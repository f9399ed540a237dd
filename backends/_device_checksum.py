"""CRC-32C of device memory, computed on the device.

A CRC is linear: that of a message is the exclusive or of what each part of it contributes, times a
power of x that says how many bits follow the part, modulo the polynomial. So every thread takes
one short segment, multiplies, and all results are joined by exclusive or.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.zarr_format import CHECKSUM_NBYTES, checksum

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    _Words = npt.NDArray[np.uint32]

__all__ = [
    "KERNEL",
    "SEGMENT_NBYTES",
    "ChecksumLane",
    "DeviceChecksum",
    "shift_table",
    "word_tables",
]

SEGMENT_NBYTES = 512
"""What one thread takes; every tile is a multiple of it."""

_POLYNOMIAL = 0x82F63B78  # CRC-32C (RFC 3720, section 12.1), lowest power of x in the highest bit
_THREADS_PER_BLOCK = 128

KERNEL = r"""
extern "C" __global__ void crc32c_segments(const uint4* data, unsigned n_segments,
                                           const unsigned* word_tables, const unsigned* shifts,
                                           unsigned* result) {
    // The four tables that take in four bytes at a time.
    __shared__ unsigned tables[4 * 256];
    for (unsigned i = threadIdx.x; i < 4 * 256; i += blockDim.x) tables[i] = word_tables[i];
    __syncthreads();
    unsigned segment = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned product = 0;
    if (segment < n_segments) {
        const uint4* place = data + (size_t)segment * (SEGMENT_NBYTES / 16);
        unsigned crc = 0;
        for (int i = 0; i < SEGMENT_NBYTES / 16; ++i) {
            uint4 four = place[i];
            unsigned words[4] = {four.x, four.y, four.z, four.w};
            for (int j = 0; j < 4; ++j) {
                crc ^= words[j];
                crc = tables[768 + (crc & 255)] ^ tables[512 + ((crc >> 8) & 255)] ^
                      tables[256 + ((crc >> 16) & 255)] ^ tables[crc >> 24];
            }
        }
        // Times the power of x that stands for the segments that follow.
        unsigned factor = shifts[n_segments - 1 - segment];
        for (int i = 0; i < 32; ++i) {
            product ^= factor & (0u - (crc >> 31));
            crc <<= 1;
            factor = (factor >> 1) ^ (POLYNOMIAL & (0u - (factor & 1)));
        }
    }
    for (int lane = 16; lane; lane /= 2) product ^= __shfl_xor_sync(0xffffffff, product, lane);
    if (threadIdx.x % 32 == 0) atomicXor(result, product);
}
"""


def word_tables() -> _Words:
    """The tables by which four bytes are taken in at once: shape ``(4, 256)``.

    Table `k` holds the remainder of each byte followed by `k` zero bytes.
    """
    tables = np.zeros((4, 256), np.uint32)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = (tables[0] >> 1) ^ np.where(tables[0] & 1, np.uint32(_POLYNOMIAL), 0)
    for k in range(1, 4):
        tables[k] = (tables[k - 1] >> 8) ^ tables[0][tables[k - 1] & 255]
    return tables


def shift_table(n_segments: int) -> _Words:
    """Element `i` is x to the number of bits in `i` segments, modulo the polynomial."""
    table = np.array([0x80000000], np.uint32)  # 1
    power = np.array([0x40000000], np.uint32)  # x
    for _ in range((8 * SEGMENT_NBYTES).bit_length() - 1):
        power = _times(power, power)
    while len(table) < n_segments:
        # `power` is x to the bits of as many segments as the table has elements.
        table = np.concatenate([table, _times(table, power)])
        power = _times(power, power)
    return table[:n_segments]


def _times(left: _Words, right: _Words) -> _Words:
    """Products modulo the polynomial; `right` has one element."""
    product = np.zeros_like(left)
    factor = int(right[0])
    for bit in range(31, -1, -1):
        product ^= np.where(left >> np.uint32(bit) & np.uint32(1), np.uint32(factor), np.uint32(0))
        factor = (factor >> 1) ^ (_POLYNOMIAL if factor & 1 else 0)
    return product


@cache
def _of_zeros(nbytes: int) -> int:
    return int.from_bytes(checksum(bytes(nbytes)), "little")


class ChecksumLane:
    """A stream and a word of memory, for one checksum at a time.

    Parameters
    ----------
    device_index
        Which CUDA device.
    """

    __slots__ = ("accumulator", "stream")

    def __init__(self, device_index: int) -> None:
        import cupy

        with cupy.cuda.Device(device_index):
            self.stream: Any = cupy.cuda.Stream(non_blocking=True)
            self.accumulator: Any = cupy.zeros(1, cupy.uint32)


class DeviceChecksum:
    """Computes checksums of tiles on one device; threads may share it.

    Parameters
    ----------
    longest_nbytes
        Bytes of the longest tile.
    device_index
        Which CUDA device.
    """

    def __init__(self, longest_nbytes: int, device_index: int) -> None:
        import cupy

        options = (f"-DSEGMENT_NBYTES={SEGMENT_NBYTES}", f"-DPOLYNOMIAL={_POLYNOMIAL:#x}u")
        self._device: Any = cupy.cuda.Device(device_index)
        with self._device:
            self._tables = cupy.asarray(word_tables())
            self._shifts = cupy.asarray(shift_table(longest_nbytes // SEGMENT_NBYTES))
            self._kernel: Any = cupy.RawKernel(KERNEL, "crc32c_segments", options)
            self._kernel.compile()
            # What was uploaded is used on other streams.
            self._device.synchronize()

    def of(self, data: torch.Tensor, lane: ChecksumLane) -> bytes:
        """Checksum of bytes on the device that are complete; returns when it is known.

        Parameters
        ----------
        data
            Shape ``(nbytes,)``, uint8, a multiple of `SEGMENT_NBYTES`, aligned to 16 bytes.
        lane
            The caller's own while this runs.
        """
        n_segments = data.numel() // SEGMENT_NBYTES
        with self._device, lane.stream:
            lane.accumulator.fill(0)
            self._kernel(
                (-(-n_segments // _THREADS_PER_BLOCK),),
                (_THREADS_PER_BLOCK,),
                (
                    data.data_ptr(),
                    np.uint32(n_segments),
                    self._tables,
                    self._shifts,
                    lane.accumulator,
                ),
            )
            linear = int(lane.accumulator.get()[0])  # waits
        # The kernel starts from zero and leaves the inversions out. What those contribute is the
        # checksum of as many zeros.
        return (linear ^ _of_zeros(data.numel())).to_bytes(CHECKSUM_NBYTES, "little")
