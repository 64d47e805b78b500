"""The styles for parallelize_module, PyTorch's and this package's: of a module's input, of columns and of rows."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from overlap_torch.parallel import (
    OverlapColwiseParallel,
    OverlapPrepareModuleInput,
    OverlapRowwiseParallel,
)

PYTORCH = (PrepareModuleInput, ColwiseParallel, RowwiseParallel)
OVERLAP = (OverlapPrepareModuleInput, OverlapColwiseParallel, OverlapRowwiseParallel)


def gathered_tokens(prepare: type = OverlapPrepareModuleInput, dim: int = 0, **options: object):
    """The style of a module whose input is cut along ``dim``, and is gathered for the layers in it."""
    return prepare(input_layouts=Shard(dim), desired_input_layouts=Replicate(), **options)
