"""A Hugging Face Llama made tensor parallel by its own plan, with these ops; needs `pip install transformers accelerate`.

    python examples/03_transformers_llama.py                       starts a rank on each GPU, or 2 on the CPU
    torchrun --nproc-per-node 2 examples/03_transformers_llama.py

The weights are random, from a config: nothing is downloaded. The parallel model's logits, the text it generates and the
loss and gradients of a training step are compared with those of the same model on one device. `--sequence` cuts the tokens
over the ranks between the blocks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from overlap_torch.integrations import transformers as integration
from ranks import add_arguments, current_device, launch


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest, in units of the second tensor's largest value."""
    return ((one - other).abs().max() / other.abs().max()).item()


def work(options: argparse.Namespace) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    world_size, device = dist.get_world_size(), current_device()
    if options.kv_heads % world_size != 0:
        raise SystemExit(
            f"{options.kv_heads} key and value heads cannot be shared out to {world_size} ranks"
        )
    if device.type == "cpu" and torch.cuda.is_available():
        raise SystemExit(
            "transformers takes the GPUs, where there are any; hide them: CUDA_VISIBLE_DEVICES= python ..."
        )
    heads = 2 * options.kv_heads
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    reference = LlamaForCausalLM(config).to(device).eval()
    integration.register()  # the styles that models' own plans name are this package's from here on
    plan = integration.sequence_plan(config) if options.sequence else "auto"
    with tempfile.TemporaryDirectory() as own_folder:
        folder = [own_folder]
        dist.broadcast_object_list(folder, src=0, device=device)
        if dist.get_rank() == 0:
            reference.save_pretrained(own_folder)
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(
            folder[0], distributed_config=DistributedConfig(tp_size=world_size, tp_plan=plan)
        )
        dist.barrier()

    tokens = torch.randint(config.vocab_size, (2, 32), device=device)
    found = {}
    with torch.no_grad():
        found["logits"] = difference(model(tokens).logits, reference(tokens).logits)
    written = [
        each.generate(
            tokens[:, :8],
            attention_mask=torch.ones_like(tokens[:, :8]),
            max_new_tokens=16,
            do_sample=False,
        )
        for each in (model, reference)
    ]

    losses = []
    # One by one: lists of tensors (foreach) may not mix DTensors with the norms' plain parameters.
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (model, reference)
    ]
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        each.train()
        loss = each(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = list(zip(model.parameters(), reference.parameters(), strict=True))
    found["gradients"] = max(difference(whole(a.grad), b.grad) for a, b in parameters)
    found["stepped weights"] = max(difference(whole(a.detach()), b.detach()) for a, b in parameters)

    if dist.get_rank() != 0:
        return
    size = sum(parameter.numel() for parameter in reference.parameters())
    print(f"{config.model_type} of {size} parameters on {world_size} ranks, {device.type}")
    for name, value in found.items():
        print(f"{name}: largest relative difference {value:.1e}")
    print(f"loss {losses[0]:.5f}, on one device {losses[1]:.5f}")
    same = "the same" if torch.equal(*written) else "NOT the same"
    print(f"generated {written[0].shape[1] - 8} tokens: {same} as on one device")


def main() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        sys.exit("this example needs transformers: pip install transformers accelerate")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "as many as there are GPUs, or 2 on the CPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--sequence", action="store_true", help="cut the tokens over the ranks")
    options = parser.parse_args()
    launch(work, options)


if __name__ == "__main__":
    main()
