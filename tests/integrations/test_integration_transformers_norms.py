"""transformers' models whose all-reduces, additions and norms are one op where rows are few: the same bits, and what is left."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures, message_of
from frameworks import SMALL_MODEL, drawn_model, loaded_model, needs_transformers, some_tokens
from operands import difference
from overlap_torch.integrations import transformers as integration

pytestmark = needs_transformers
LAYERS = 3


def loaded(
    folder: str,
    family: str,
    dtype: torch.dtype = torch.bfloat16,
    plan="auto",
    registers=True,
    **more,
):
    """A model of random weights, its norms too, by this package's styles."""
    from transformers import AutoConfig

    sizes = SMALL_MODEL | {"hidden_size": 32, "num_hidden_layers": LAYERS, "head_dim": 8}
    if dist.get_rank() == 0:
        config = AutoConfig.for_model(family, **sizes, **more)
        drawn_model(config, dtype=dtype).save_pretrained(folder)
    dist.barrier()
    with integration.register() if registers else contextlib.nullcontext():
        return loaded_model(folder, plan, dtype=dtype)


def notes_of(model) -> list[str]:
    """The report's lines on the model; other tests' calls of experts have lines of their groups."""
    return [line for line in overlap_torch.report(model).notes if not line.startswith("group ")]


def decoded(model, hook=None) -> list[torch.Tensor]:
    """Logits of a prompt and of steps after it, and the tokens of greedy generation."""
    handles = [layer.register_forward_hook(hook) for layer in model.model.layers[1:] if hook]
    with torch.no_grad():
        found = model(some_tokens(2, 5), use_cache=True)
        logits = [found.logits]
        for step in range(3):
            found = model(some_tokens(2, 1) + step, cache=found.cache, use_cache=True)
            logits.append(found.logits)
        generated = model.generate(some_tokens(2, 5), max_new_tokens=4, do_sample=False)
    for handle in handles:
        handle.remove()
    return [*logits, generated]


def changed_in_place(module, args, output: torch.Tensor) -> None:
    output.add_(1)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.ranks((2, "gloo"))
def test_fused_norms_are_the_models(failures: Failures, tmp_path, family: str) -> None:
    model = loaded(str(tmp_path), family)
    for hook in (None, changed_in_place):
        right = decoded(model, hook)
        with integration.fuse_norms(model):
            found = decoded(model, hook)
            notes = notes_of(model)
        # a prompt and three steps; a prompt of generation and three steps
        said = [f"all-reduce, addition and RMSNorm as one op: {8 * LAYERS} calls of layers"]
        failures.equal(notes, said, hook)
        failures.expect_equal(found, right, "step", hook)


@pytest.mark.ranks((2, "gloo"))
def test_other_calls_run_as_the_model_says(failures: Failures, tmp_path) -> None:
    """The calls that are left, with the reason, and the bits of the model."""
    model = loaded(str(tmp_path), "llama")
    many = some_tokens(1, 513)
    cases = (
        ("gradients are recorded", torch.enable_grad, some_tokens(2, 5)),
        ("torch.inference_mode", torch.inference_mode, some_tokens(2, 5)),
        ("more than 512 rows", torch.no_grad, many),
        ("autocast", lambda: torch.autocast(many.device.type, torch.bfloat16), some_tokens(2, 5)),
    )
    for expected, context, tokens in cases:
        with torch.no_grad(), context():
            right = model(tokens, use_cache=False).logits
            with integration.fuse_norms(model) as fusion:
                found = model(tokens, use_cache=False).logits
                notes = notes_of(model)
                again = message_of(integration.fuse_norms, model)
                failures.holds("fused already", again, expected)
        fusion.undo()
        failures.expect(difference(found, right), expected)
        said = f"one after the other: {LAYERS} calls of layers, "
        alike = len(notes) == 2 and said in notes[1] and expected in notes[1]
        failures.expect(None if alike else f"report says {notes}", expected)
    failures.expect(None if not notes_of(model) else "not undone")
    wide = loaded(str(tmp_path), "llama", torch.float32)
    with torch.no_grad(), integration.fuse_norms(wide):
        wide(some_tokens(2, 5), use_cache=False)
        notes = notes_of(wide)
    failures.holds("torch.float32, which no", notes[1], "float32")


@pytest.mark.ranks((2, "gloo"))
def test_fused_norms_leave_hooks_and_wrappers_their_projection(
    failures: Failures, tmp_path
) -> None:
    """A hook of a linear gets what the model's has, and a wrapper that took its place, as an adapter's, keeps the residual."""
    model, tokens = loaded(str(tmp_path), "llama"), some_tokens(2, 5)
    names = ("self_attn.o_proj", "mlp.down_proj")

    def logits():
        with torch.no_grad():
            return model(tokens, use_cache=False).logits

    whole = logits()
    linears = [layer.get_submodule(name) for layer in model.model.layers for name in names]
    hooks = [each.register_forward_hook(lambda *given: given[2] * 0.5) for each in linears]
    right = logits()
    with integration.fuse_norms(model):
        failures.expect(difference(logits(), right), "hooks")
        failures.holds("a linear has forward hooks", notes_of(model)[1], "hooks")
        for hook in hooks:
            hook.remove()
        for layer in model.model.layers:
            layer.self_attn.o_proj = torch.nn.Sequential(layer.self_attn.o_proj)
            layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj)
        failures.expect(difference(logits(), whole), "wrappers")


@pytest.mark.ranks((2, "gloo"))
def test_models_of_other_forms_are_refused(failures: Failures, tmp_path) -> None:
    cases = (
        ("o_proj has a bias", "llama", {"attention_bias": True}),
        ("its layers are GemmaDecoderLayer", "gemma", {}),
        ("o_proj has the layouts", "llama", {"plan": "sequence"}),
        ("o_proj is a Linear", "llama", {"registers": False}),
    )
    for i, (expected, family, more) in enumerate(cases):
        if more.get("plan") == "sequence":
            from transformers import LlamaConfig

            more = {"plan": integration.sequence_plan(LlamaConfig())}
        model = loaded(str(tmp_path / str(i)), family, **more)
        kinds = [type(module) for module in model.modules()]
        failures.raises(expected, integration.fuse_norms, model)
        failures.equal(kinds, [type(module) for module in model.modules()], expected)
