"""A network cut over ranks: within layers (tensor parallel), and over data-parallel ranks (FSDP2).

A net says by itself what can be cut: `shardable_blocks()`, its repeating parts, and
`parallel_plan(ranks)`, the layers that tensor parallel ranks share: by `columns` or by `rows`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from ..errors import UserError
from .network import Network

STYLES = {"columns": ColwiseParallel, "rows": RowwiseParallel}


def shard(network: Network, mesh: DeviceMesh) -> None:
    """Cut a network over a mesh with the dimensions `data_parallel` and `tensor_parallel`.

    Raises:
        UserError: If the net has no plan for tensor parallel ranks, or they do not divide it.
    """
    together = mesh["tensor_parallel"]
    if together.size() > 1:
        plan = getattr(network.net, "parallel_plan", None)
        if plan is None:
            raise UserError(
                f"trainer.strategy.tensor_parallel_size={together.size()}: "
                f"{type(network.net).__name__} has no parallel_plan(). Take 1, or model=vit."
            )
        try:
            styles = {layer: STYLES[cut]() for layer, cut in plan(together.size()).items()}
        except ValueError as error:
            raise UserError(f"trainer.strategy.tensor_parallel_size: {error}") from error
        parallelize_module(network.net, together, styles)
    for block in blocks_of(network):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(network, mesh=mesh["data_parallel"])


def blocks_of(network: Network) -> list[nn.Module]:
    """The repeating parts of the net, which are gathered or recomputed one at a time."""
    blocks: list[nn.Module] = getattr(network.net, "shardable_blocks", list)()
    return blocks


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale gradients down to a norm over all of them.

    Tensor parallel layers live on another mesh than the rest, and no operation takes both.
    """
    groups: dict[DeviceMesh, list[nn.Parameter]] = defaultdict(list)
    for weights in parameters:
        if isinstance(weights.grad, DTensor):
            groups[weights.grad.device_mesh].append(weights)
    norms: list[Tensor] = []
    for group in groups.values():
        norm = get_total_norm([weights.grad for weights in group if weights.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if norms:
        total = get_total_norm(norms)
        for group in groups.values():
            clip_grads_with_norm_(group, max_norm, total)


def recompute_activations(network: Network) -> None:
    """Keep no activations within the blocks: the backward pass computes them again.

    In place, so the keys of the checkpoint stay as they are.

    Raises:
        UserError: If the net has no blocks.
    """
    blocks = blocks_of(network)
    if not blocks:
        name = type(network.net).__name__
        raise UserError(f"activation_checkpointing=true: {name} has no shardable_blocks().")
    for block in blocks:
        norms = [one for one in block.modules() if isinstance(one, _BatchNorm)]
        # Only where it must be: torch.compile takes no contexts.
        options: dict[str, Any] = {"context_fn": partial(_contexts, norms)} if norms else {}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def _contexts(
    norms: list[_BatchNorm],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _without_statistics(norms)


@contextmanager
def _without_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    """Batch normalisation has counted this batch already."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
