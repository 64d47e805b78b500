"""The benchmark of Hugging Face models: what it measures, of which styles, and that it compares results first."""

from types import SimpleNamespace

import pytest
import torch

from bench_runs import bench
from checks import message_of
from frameworks import SMALL_MODEL, needs_transformers
from operands import as_torchrun_places, rank_device

pytestmark = needs_transformers
SIZES = {name: size for name, size in SMALL_MODEL.items() if size is not None}


def rows_of(folder: str) -> tuple[list[list[str]], str]:
    """Its table's lines, and what is said of a model that computes something else."""
    module = bench("transformers_models")
    job = SimpleNamespace(sizes=SIZES, tokens=8, sequences=2, work=module.WORK, repeats=1)
    device = rank_device()
    with as_torchrun_places():
        models = module.load_all(job, folder, device)
    module.check(models, job, device)
    rows = list(module.lines(module.measured(models, job, device)))
    with torch.no_grad():
        models["auto"].model.norm.weight.mul_(2)
    return rows, message_of(module.check, models, job, device)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_models_are_measured_with_each_style(ranks, tmp_path):
    rows, said = ranks.run(rows_of, str(tmp_path))[0]
    all_styles = ["transformers", "auto", "sequence"]
    right = [(work, style) for work in ("prefill", "step") for style in all_styles]
    right += [("decode", style) for style in all_styles[:2]]
    assert [(work, style) for work, style, *_ in rows] == right
    assert [row[-1] for row in rows if row[1] == "transformers"] == ["1.00"] * 3
    assert all(float(row[2].split()[0]) > 0 for row in rows)
    assert said.startswith("auto: the logits are off by ")


def logits_of_decoding() -> list[torch.Tensor]:
    """A step of the plain Llama by each eager variant, and transformers' of the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    module = bench("decode")
    (block,) = bench("shapes").parse_blocks("64x4x2x96@1")  # one position: no keys but its own
    args = SimpleNamespace(layers=2, vocabulary=40)
    tokens = torch.arange(3, device=rank_device())[:, None] * 7
    whole = module.whole_model(block, 3, args)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 40}
    config = LlamaConfig(**SMALL_MODEL | sizes, rms_norm_eps=1e-5)
    right = LlamaForCausalLM(config).to(rank_device(), torch.bfloat16)
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in whole.state_dict().items()
    }
    right.load_state_dict(weights)
    with torch.no_grad():
        found = [right(tokens, use_cache=False).logits]
        return found + [module.model_of(name, block, 3, args)(tokens) for name in module.EAGER]


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_decoding_is_a_llamas(ranks):
    right, *variants = ranks.run(logits_of_decoding)[0]
    assert torch.equal(variants[2], variants[1])
    for found in variants:  # sums of two ranks are rounded once more
        torch.testing.assert_close(found, right, rtol=0.05, atol=0.05)
    if ranks.world == 1:
        assert torch.equal(variants[0], right)
