"""Your own CUDA kernel, compiled at run time: its tiles are communicated while it computes the next ones.

    python examples/06_cuda_kernel.py                       starts a rank on each GPU; needs nvcc
    torchrun --nproc-per-node 2 examples/06_cuda_kernel.py

The kernel is a plain one: each block computes a tile of 32 x 32. A kernel for one GPU would not have the lines that end with
`// overlap`. The result is compared with the kernel and a collective, one after the other.
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load_inline

import overlap_torch
from ranks import add_arguments, current_device, launch

TILE = 32

CUDA = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include <overlap/launch.cuh>  // overlap
#include <overlap/signal.cuh>  // overlap

constexpr int kTile = 32;

// c = a @ b, all row-major.
__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k,
                       const int* tile_order, const int* tile_chunk, int* counters) {
  __shared__ float left[kTile][kTile];
  __shared__ float right[kTile][kTile];
  const int tile = overlap::tile(tile_order, blockIdx.x);  // overlap
  const int columns = (n + kTile - 1) / kTile;
  const int row = tile / columns * kTile + threadIdx.y;
  const int column = tile % columns * kTile + threadIdx.x;
  float sum = 0;
  for (int first = 0; first < k; first += kTile) {
    const int along = first + threadIdx.x;
    const int down = first + threadIdx.y;
    left[threadIdx.y][threadIdx.x] = row < m && along < k ? a[row * k + along] : 0;
    right[threadIdx.y][threadIdx.x] = down < k && column < n ? b[down * n + column] : 0;
    __syncthreads();
    for (int i = 0; i < kTile; ++i) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = sum;
  overlap::signal(counters, tile_chunk[tile]);  // overlap
}

void run(torch::Tensor a, torch::Tensor b, torch::Tensor c, torch::Tensor tile_order, torch::Tensor tile_chunk,
         torch::Tensor counters, int64_t smem_pad_bytes) {
  C10_CUDA_CHECK(overlap::launch(  // overlap: padded, so that SMs have room for communication
      matmul, tile_order.numel(), dim3(kTile, kTile), 0, smem_pad_bytes, c10::cuda::getCurrentCUDAStream(),
      a.data_ptr<float>(), b.data_ptr<float>(), c.data_ptr<float>(), a.size(0), b.size(1), a.size(1),
      tile_order.data_ptr<int>(), tile_chunk.data_ptr<int>(), counters.data_ptr<int>()));
}
"""
DECLARATION = (
    "void run(torch::Tensor a, torch::Tensor b, torch::Tensor c, torch::Tensor tile_order, torch::Tensor tile_chunk, "
    "torch::Tensor counters, int64_t smem_pad_bytes);"
)
SHARED_BYTES = 2 * TILE * TILE * 4  # of a block


@functools.cache
def module():
    """Compiled by one rank of a host at a time, with nvcc."""
    return load_inline(
        name="overlap_example_matmul",
        cpp_sources=DECLARATION,
        cuda_sources=CUDA,
        functions=["run"],
        extra_include_paths=[overlap_torch.include_path()],
    )


def row_parallel(a: torch.Tensor, b: torch.Tensor, chunks: int, group=None) -> torch.Tensor:
    """all_reduce(a @ b) of float32 matrices."""
    run = module().run
    with overlap_torch.produce(
        "all_reduce",
        (a.shape[0], b.shape[1]),
        a.dtype,
        tile=(TILE, TILE),
        chunks=chunks,
        group=group,
    ) as job:
        pad = job.smem_pad_bytes(SHARED_BYTES)
        run(a, b, job.output, job.tile_order, job.tile_chunk, job.counters, pad)
    return job.result()


def work(options: argparse.Namespace) -> None:
    device = current_device()
    generator = torch.Generator().manual_seed(dist.get_rank())
    a, b = (
        torch.randint(-3, 4, shape, generator=generator).float().to(device)
        for shape in ((options.rows, options.inner), (options.inner, options.columns))
    )
    expected = a @ b
    dist.all_reduce(expected)
    for words, resources in (
        ("as many blocks as an SM holds", overlap_torch.resources()),
        ("one block an SM, at low priority", overlap_torch.resources(by="padding", ctas_per_sm=1, priority="low")),
    ):  # fmt: skip
        with resources:
            worst = (row_parallel(a, b, 4) - expected).abs().max().item()
        overlap_torch.check()
        if dist.get_rank() == 0:
            print(f"CUDA kernel, all_reduce, {words}: largest difference {worst:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "as many as there are GPUs")
    for size, default in (("rows", 2048), ("columns", 1024), ("inner", 512)):
        parser.add_argument(f"--{size}", type=int, default=default)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(
            1, "a CUDA kernel needs a GPU; examples/05_triton_kernels.py runs on CPU, too\n"
        )
    launch(work, options)


if __name__ == "__main__":
    main()
