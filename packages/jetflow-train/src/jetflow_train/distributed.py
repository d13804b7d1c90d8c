"""Data parallelism under `torchrun`: every rank holds the whole head and computes its share of each step's blocks.

Ranks meet once a step: one sum over the step's totals and the float32 gradients of the master weights. That is plain
data parallelism, done behind the backward pass instead of inside it (as DistributedDataParallel would): the sum is float32
for a bfloat16 head too, accumulation needs no special case, and a rank without blocks takes part with zeros.
The frozen target, which every rank needs for features, is sharded layer by layer (FSDP2).
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import get_node_local_rank
from torch.distributed.fsdp import fully_shard

from jetflow_core.model import Decoder, resolve_device

PATIENCE = timedelta(hours=2)  # how long ranks wait for one that evaluates or writes


@dataclass(frozen=True)
class Ranks:
    """This process among `world` of them; alone by default. `local` counts on this machine; `mesh` is what FSDP2 shards over."""

    rank: int = 0
    world: int = 1
    local: int = 0
    mesh: DeviceMesh | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes files, measures and speaks."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device option of this rank: its own GPU where `name` leaves the choice."""
        own = self.world > 1 and name in ("auto", "cuda") and resolve_device(name).type == "cuda"
        return f"cuda:{self.local}" if own else name

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.world > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                assert work is not None
                work.wait()

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by the first rank's."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def agree(self, value: float) -> float:
        """The first rank's `value`."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(shared, 0)
        return shared.item()

    def wait(self) -> None:
        """Return when every rank has come here."""
        self.agree(0.0)
        self.add([torch.zeros(1)])


ALONE = Ranks()


@contextmanager
def joined(device: str) -> Generator[Ranks]:
    """Join the processes that `torchrun` has started; alone without it. `device` is the option of that name.

    Raises ValueError on ranks that wait for one that has ended.
    """
    if not launched():
        yield ALONE
        return
    local = get_node_local_rank()
    cuda = resolve_device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    mesh = init_device_mesh("cuda" if cuda else "cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    try:
        yield Ranks(rank, dist.get_world_size(), local, mesh)
    except BaseException as error:
        if not cuda:  # NCCL could wait here for ranks that do not come; torchrun ends them
            traceback.clear_frames(error.__traceback__)
            _leave(mesh)
        if isinstance(error, RuntimeError) and _is_deserted(error):
            raise ValueError(f"rank {rank} stops, since another rank has ended: look for what that one says") from error
        raise
    _leave(mesh)


def _leave(mesh: DeviceMesh) -> None:
    """End the process group and its threads: one that still frees a tensor while Python exits would abort the process.

    The threads end with the last reference to the group. A sharded model, which is cyclic garbage by now, has some, and so
    has the mesh (since torch 2.12), which DTensor's caches keep for good.
    """
    vars(mesh).get("_pg_registry", {}).clear()
    dist.destroy_process_group()
    gc.collect()


def _is_deserted(error: RuntimeError) -> bool:
    """Whether `error` is a process group's. Gloo has no type of its own for a peer that is gone."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def launched() -> bool:
    """Whether `torchrun` has started this process."""
    return dist.is_torchelastic_launched()


class SharedTarget:
    """Shards the layers of a frozen target over `ranks` (FSDP2); embedding and LM head stay whole, the head shares them.

    The layers of a pass come from all ranks, so all must make it together. Each rank uses `model` as often as its own rows
    need, and then calls `follow`, which makes the passes that others still need. Alone, nothing changes.
    """

    def __init__(self, model: Decoder, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._following = False
        if ranks.world > 1:
            for layer in model.layers:
                # Each layer is a root, which by default would stay whole after its pass.
                fully_shard(layer, mesh=ranks.mesh, reshard_after_forward=True)
            model.register_forward_pre_hook(self._announce)

    def _announce(self, *_: object) -> None:
        if not self._following:
            self._needed(True)

    def _needed(self, here: bool) -> bool:
        """Whether any rank needs another pass."""
        votes = torch.tensor([float(here)])
        self._ranks.add([votes])
        return bool(votes > 0)

    @torch.no_grad()
    def follow(self) -> None:
        """Take part in the other ranks' passes until every rank has come here."""
        token = torch.zeros(1, dtype=torch.int64, device=self._model.embed.device)
        while self._ranks.world > 1 and self._needed(False):
            self._following = True
            self._model.forward_sequence(token)
            self._following = False


def deal(counts: Sequence[int], parts: int) -> list[list[int]]:
    """Distribute items of the given sizes over `parts`: each goes, in order, to the part that has least so far."""
    dealt: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for item, count in enumerate(counts):
        least = filled.index(min(filled))
        dealt[least].append(item)
        filled[least] += count
    return dealt
