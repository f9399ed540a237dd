"""Real English that every Python carries: the help texts of its language reference."""

from __future__ import annotations

import functools
from pydoc_data.topics import topics

import torch

VOCABULARY = 256  # a token is a byte


@functools.cache
def corpus() -> torch.Tensor:
    """Return all topics in one run of bytes (about 460 KiB)."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


class Batches:
    """Random windows of the corpus; which ones depends on seed, rank and step, on nothing else."""

    def __init__(
        self, seq_length: int, batch_size: int, *, seed: int, rank: int, device: torch.device
    ) -> None:
        self._window = torch.arange(seq_length + 1)
        self._positions = self._window[:-1].expand(batch_size, -1).to(device)
        self._batch_size, self._device = batch_size, device
        self._seed = seed * 1_000_003 + rank * 10_007

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, labels (the next byte) and positions, each (batch, sequence)."""
        random = torch.Generator().manual_seed(self._seed * 7_919 + step)
        last_start = len(corpus()) - len(self._window)
        starts = torch.randint(0, last_start + 1, (self._batch_size, 1), generator=random)
        windows = corpus()[starts + self._window].to(self._device)
        return windows[:, :-1], windows[:, 1:], self._positions
