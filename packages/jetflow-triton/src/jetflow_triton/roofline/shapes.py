"""Models, GPUs and steps of the roofline sheet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """Shapes of a decoder, from its public configuration."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    inner: int
    vocab: int
    experts: int = 0
    top_k: int = 0


QWEN3_8B = Model("Qwen3-8B", 4096, 36, 32, 8, 128, 12288, 151936)
QWEN3_30B_A3B = Model("Qwen3-30B-A3B", 2048, 48, 32, 4, 128, 768, 151936, 128, 8)
MODELS = (QWEN3_8B, QWEN3_30B_A3B)


LAUNCH = 2e-6  # seconds a dependent kernel of a captured graph takes to start and drain


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: bytes a second of memory and of the L2 cache, dense 2-byte FLOPs a second, multiprocessors, seconds a launch."""

    name: str
    bandwidth: float
    cache_bandwidth: float
    flops: float
    processors: int
    launch: float = LAUNCH


# Data sheets, except the L2: about 5.5 TB/s of reads in public microbenchmarks of the H100, the same chip as the H200's.
H100 = Device("H100 SXM", 3.35e12, 5.5e12, 989e12, 132)
H200 = Device("H200", 4.8e12, 5.5e12, 989e12, 132)
# HGX B200 data sheet; 148 multiprocessors. Its L2 is not measured here: taken to be to its memory what the H100's is.
B200 = Device("B200", 8e12, 8e12 * H100.cache_bandwidth / H100.bandwidth, 2250e12, 148)


@dataclass(frozen=True, slots=True)
class Load:
    """One verification step: `batch` sequences with `budget` tree nodes each behind `context` cached tokens."""

    batch: int
    budget: int
    context: int

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return self.batch * self.budget


LOADS = tuple(Load(b, n, c) for b in (1, 8, 32) for n in (16, 64, 256) for c in (1024, 8192, 32768))
