"""Hugging Face transformers' tensor parallelism with the styles of this package: the same models, and the ops are called."""

import re
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import overlap_torch
from checks import Failures
from frameworks import SMALL_MODEL, drawn_model, loaded_model, needs_transformers, some_tokens
from graphs import Graphs, expect_counts
from layers import op_counts
from meshes import whole_of
from operands import rank_device
from overlap_torch.integrations import transformers as integration

pytestmark = needs_transformers

LAYERS = SMALL_MODEL["num_hidden_layers"]
TOKENS = 12


def config_of(family: str):
    from transformers import LlamaConfig, Qwen3Config

    if family == "qwen3":
        return Qwen3Config(**SMALL_MODEL, head_dim=8, tie_word_embeddings=True)
    return LlamaConfig(**SMALL_MODEL, attention_bias=True, mlp_bias=True)


def saved(family: str, folder: Path):
    """The whole model, whose checkpoint rank 0 has put into the folder."""
    model = drawn_model(config_of(family))
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model.to(rank_device())


def loaded_with_styles(folder: Path, plan="auto"):
    with integration.register():
        return loaded_model(folder, plan)


def kinds_of_hidden_states(model, tokens: torch.Tensor) -> set[type]:
    """The hidden states that the norms within the layers see, where gradients are recorded."""
    kinds = set()
    handles = [
        norm.register_forward_pre_hook(lambda _, args: kinds.add(type(args[0])))
        for layer in model.model.layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return kinds


def trained(model, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, loss, gradients and parameters of an optimizer's step."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    output = model(tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    found = {"logits": output.logits, "loss": output.loss}
    parameters = dict(model.named_parameters())
    found |= {f"gradient of {name}": whole_of(each.grad) for name, each in parameters.items()}
    optimizer.step()
    found |= {f"stepped {name}": whole_of(each) for name, each in parameters.items()}
    return {name: tensor.detach() for name, tensor in found.items()}


def expect_same(failures: Failures, found, right, *where) -> None:
    """float32, sums over a few dozen features in another order; on GPUs attention's, too."""
    tolerance = 1e-6 if rank_device().type == "cpu" else 1e-5
    if found.keys() != right.keys():
        failures.expect(f"{found.keys() ^ right.keys()}", *where)
    for name, tensor in found.items():
        failures.near(tensor, right[name], *where, name, rtol=1e-4, atol=tolerance)


# The whole step's calls. Without sequence parallelism forward reduces after o_proj and down_proj, and backward after q, k,
# v, gate, up and the head. With it the tokens are gathered before attention, MLP and head, and scattered after
# attention and MLP; backward does the reverse of each.
AUTO_CALLS = {"gemm_allreduce": (2 + 5) * LAYERS + 1}
SEQUENCE_CALLS = {
    "allgather_gemm": (2 + 2) * LAYERS + 1,
    "gemm_reducescatter": (2 + 2) * LAYERS + 1,
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_models_train_as_with_transformers_own_styles(
    failures: Failures, family: str, tmp_path
) -> None:
    whole = saved(family, tmp_path)
    tokens = some_tokens(2, TOKENS)
    right = trained(whole, tokens)
    theirs = trained(loaded_model(tmp_path), tokens)
    expect_same(failures, theirs, right, "transformers' own")
    with integration.register():
        sequence = integration.sequence_plan(config_of(family))
        models = {"auto": loaded_model(tmp_path), "sequence": loaded_model(tmp_path, sequence)}
    for kind, calls in (("auto", AUTO_CALLS), ("sequence", SEQUENCE_CALLS)):
        found = {}
        counted = op_counts(lambda: found.update(trained(models[kind], tokens)))  # noqa: B023, called at once
        expect_same(failures, found, right, kind, "and the whole model")
        expect_same(failures, found, theirs, kind, "and transformers' own")
        failures.equal(counted, calls, kind, "calls")
    for count, kind in ((TOKENS, torch.Tensor), (TOKENS - 1, DTensor)):
        kinds = kinds_of_hidden_states(models["sequence"], some_tokens(2, count))
        failures.equal(kinds, {kind}, "hidden states of", count)
    models["sequence"] = loaded_with_styles(tmp_path, sequence)
    models["sequence"].gradient_checkpointing_enable()
    expect_same(failures, trained(models["sequence"], tokens), right, "checkpointed")
    report = overlap_torch.report(models["auto"])
    said = {row["layer"] for row in report if row["op"] == "gemm_allreduce"}
    name = "model.layers.1.mlp.down_proj"
    failures.expect(None if any(name in layer for layer in said) else str(report), "report")


@pytest.mark.ranks((4, "gloo"), (4, "nccl"))
def test_models_train_beside_fsdp(failures: Failures, tmp_path) -> None:
    """Two ranks that share a model's features, and FSDP over two such pairs, which have other tokens."""
    whole = saved("llama", tmp_path)
    pair = dist.get_rank() // 2
    tokens = [some_tokens(2, TOKENS), (some_tokens(2, TOKENS) + 11) % 60]
    of_pairs = []
    for each in tokens:
        whole.zero_grad()
        whole(each, labels=each, use_cache=False).loss.backward()
        of_pairs.append({name: part.grad.clone() for name, part in whole.named_parameters()})
    right = {name: (of_pairs[0][name] + of_pairs[1][name]) / 2 for name in of_pairs[0]}
    with integration.register():
        for kind, plan in (("auto", "auto"), ("sequence", integration.sequence_plan(whole))):
            model = loaded_model(tmp_path, plan, fsdp_size=2)
            model.train()
            own = tokens[pair]
            model(own, labels=own, use_cache=False).loss.backward()
            found = {name: whole_of(part.grad) for name, part in model.named_parameters()}
            expect_same(failures, found, right, kind)


# As AUTO_CALLS, by direction; and the collectives without a GEMM: of the embedding's output, and of the whole logits.
AUTO_FUSED = {
    ("forward", "gemm_allreduce"): 2 * LAYERS,
    ("backward", "gemm_allreduce"): 5 * LAYERS + 1,
}
AUTO_APART = {("forward", "all_reduce"): 1, ("forward", "all_gather"): 1}


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.whole)])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_inductor_fuses_all_of_transformers_own_styles(
    failures: Failures, family: str, tmp_path
) -> None:
    """transformers' own styles, compiled with the pass."""
    whole = saved(family, tmp_path)
    tokens = some_tokens(2, TOKENS)
    right = trained(whole, tokens)
    model = loaded_model(tmp_path)
    graphs = Graphs()
    logits = graphs.compile(lambda tokens: model(tokens, use_cache=False).logits)(tokens)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = {"logits": logits.detach(), "loss": loss.detach()}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = whole_of(parameter.grad)
    expect_same(failures, found, {name: right[name] for name in found}, family)
    expect_counts(failures, graphs, AUTO_FUSED, AUTO_APART)
    for row in graphs.rows:
        line = re.match(rf"\S+modeling_{family}\.py:\d+: ", row["source"])
        failures.expect(None if line else row["source"], row["module"])


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_models_generate_and_save(failures: Failures, tmp_path) -> None:
    """Greedy, with a cache; tokens of an odd number, cut over the ranks; a checkpoint that is saved is the whole model's."""
    whole = saved("llama", tmp_path).eval()
    tokens = some_tokens(2, 5)
    with integration.register():
        model = loaded_model(tmp_path).eval()
        sequence = loaded_model(tmp_path, integration.sequence_plan(whole)).eval()
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 6, "do_sample": False}
    written = []
    counted = op_counts(lambda: written.append(model.generate(tokens, **options)))
    right = whole.generate(tokens, **options)
    failures.expect_equal(written, [right], "generated")
    failures.equal(counted, {"gemm_allreduce": 6 * 2 * LAYERS}, "calls")
    with torch.no_grad():
        found = {"logits": sequence(tokens).logits}
        expect_same(failures, found, {"logits": whole(tokens).logits}, "five tokens of two ranks")
    model.save_pretrained(f"{tmp_path}/again")
    dist.barrier()
    again = type(whole).from_pretrained(f"{tmp_path}/again").to(rank_device())
    for (name, tensor), other in zip(
        whole.state_dict().items(), again.state_dict().values(), strict=True
    ):
        failures.expect(None if torch.equal(tensor, other) else "differs", "saved", name)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_a_norm_without_a_style_is_refused(failures: Failures, tmp_path) -> None:
    """A norm whose gradient would be that of this rank's tokens is refused, as DTensors do it; without gradients it is right."""
    whole = saved("llama", tmp_path)
    tokens = some_tokens(2, TOKENS)
    plan = integration.sequence_plan(whole)
    del plan["model.layers.*.input_layernorm"]
    model = loaded_with_styles(tmp_path, plan)
    failures.raises("mixed torch.Tensor and DTensor", trained, model, tokens)
    with torch.no_grad():
        found, right = ({"logits": each(tokens, use_cache=False).logits} for each in (model, whole))
    expect_same(failures, found, right, "without gradients")


def checkpointed(name: str):
    """A change of a model: a part of each layer is computed again in backward, by itself and by a reentrant checkpoint."""

    def change(model) -> None:
        for layer in model.model.layers:
            part = layer.get_submodule(name)
            forward = part.forward
            part.forward = lambda hidden, f=forward: checkpoint(f, hidden, use_reentrant=True)

    return change


def shared(name: str):
    """A change of a model: its layers have one part in common."""

    def change(model) -> None:
        first, *others = model.model.layers
        for layer in others:
            setattr(layer, name, getattr(first, name))

    return change


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_layers_with_cut_tokens_may_be_changed(failures: Failures, tmp_path) -> None:
    """Layers whose tokens are cut get the whole model's gradients, or raise an error."""
    tokens = some_tokens(2, TOKENS)
    changes = {
        "checkpointed norm": checkpointed("post_attention_layernorm"),
        "checkpointed MLP": checkpointed("mlp"),
        "shared norm": shared("input_layernorm"),
        "shared MLP": shared("mlp"),
    }
    for name, change in changes.items():
        whole = saved("llama", tmp_path)
        model = loaded_with_styles(tmp_path, integration.sequence_plan(whole))
        for each in (whole, model):
            change(each)
        expect_same(failures, trained(model, tokens), trained(whole, tokens), name)
    whole = saved("llama", tmp_path)
    plan = integration.sequence_plan(whole)
    plan |= {name: "sequence_parallel" for name in plan if "layernorm" in name}
    model = loaded_with_styles(tmp_path, plan)
    expect_same(failures, trained(model, tokens), trained(whole, tokens), "transformers' norms")


def expanded(model, plan: dict[str, str]) -> dict[str, str]:
    """A plan with the names of all modules and parameters, as transformers applies it."""
    found = {}
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            found |= {f"{name}.{key}": style for key, _ in module.named_parameters(recurse=False)}
            found[name] = style
    return found


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_other_layers_keep_transformers_styles_where_tokens_are_cut(
    failures: Failures, tmp_path
) -> None:
    """Projections that are no plain Linear, with transformers' style in a layer whose tokens are cut; the report says so."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    class Adapted(torch.nn.Linear):
        pass

    whole = saved("llama", tmp_path)
    model = type(whole).from_pretrained(tmp_path).to(rank_device())
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = layer.self_attn.o_proj.__class__ = Adapted
    plan = expanded(model, integration.sequence_plan(whole))
    mesh = dist.init_device_mesh(rank_device().type, (dist.get_world_size(),))
    with integration.register(), pytest.warns(UserWarning, match="subclass of torch.nn.Linear"):
        apply_tensor_parallelism(model, mesh, plan)
    for tokens in (some_tokens(2, TOKENS), some_tokens(2, TOKENS + 1)):
        with torch.no_grad():
            found, right = ({"logits": each(tokens).logits} for each in (model, whole))
        expect_same(failures, found, right, tokens.shape)
    tokens = some_tokens(2, TOKENS)
    expect_same(failures, trained(model, tokens), trained(whole, tokens), "trained")
    failures.holds("PyTorch's style: it is a subclass", str(overlap_torch.report(model)), "report")


# --- the registry, plans and versions -------------------------------------------------------------------------


def styles_now() -> dict[str, type]:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    return {name: type(style) for name, style in ALL_PARALLEL_STYLES.items()}


def test_twice_is_once_and_the_last_handle_undoes():
    integration.register().undo()  # transformers' module of experts adds styles when it is imported
    before = styles_now()
    first = integration.register()
    names = {"colwise", "colwise_rep", "colwise_gather_output"}
    names |= {"rowwise", "rowwise_rep", "rowwise_split_input"}
    changed = {name for name, kind in styles_now().items() if before.get(name) is not kind}
    named = {name for name in changed if name.startswith("overlap_")}
    assert changed - named == names and len(named) == 8
    with integration.register():
        first.undo()
        first.undo()
        assert {
            name for name, kind in styles_now().items() if before.get(name) is not kind
        } == changed
    assert styles_now() == before
    with integration.register(auto=False):
        assert styles_now().keys() - before.keys() == named
        assert all(styles_now()[name] is kind for name, kind in before.items())
    assert styles_now() == before


def test_a_later_registration_takes_transformers_present_styles():
    from torch.distributed.tensor import Replicate
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel

    integration.register().undo()
    gathers = ColwiseParallel(output_layouts=Replicate())
    with mock.patch.dict(type(ALL_PARALLEL_STYLES)._global_mapping, colwise=gathers):
        with integration.register():
            ours = ALL_PARALLEL_STYLES["colwise"]
            assert ours is not gathers and ours.output_layouts == Replicate()
        assert ALL_PARALLEL_STYLES["colwise"] is gathers


def test_sequence_plan_of_llama():
    layer = "model.layers.*"
    assert integration.sequence_plan(config_of("llama")) == {
        layer: "overlap_sequence",
        f"{layer}.input_layernorm": "overlap_sequence_norm",
        f"{layer}.self_attn": "overlap_sequence_input",
        f"{layer}.self_attn.q_proj": "overlap_colwise",
        f"{layer}.self_attn.k_proj": "overlap_colwise",
        f"{layer}.self_attn.v_proj": "overlap_colwise",
        f"{layer}.self_attn.o_proj": "overlap_rowwise_sequence",
        f"{layer}.post_attention_layernorm": "overlap_sequence_norm",
        f"{layer}.mlp": "overlap_sequence_input",
        f"{layer}.mlp.gate_proj": "overlap_colwise",
        f"{layer}.mlp.up_proj": "overlap_colwise",
        f"{layer}.mlp.down_proj": "overlap_rowwise_sequence",
        "model.norm": "overlap_sequence_norm",
        "lm_head": "overlap_colwise_gather_output",
    }


def test_sequence_plan_refuses_what_it_does_not_know():
    from transformers import GPT2Config, MixtralConfig

    experts = MixtralConfig(**SMALL_MODEL, num_local_experts=2)
    with pytest.raises(ValueError, match="no plan of sequence parallelism is known for Mixtral"):
        integration.sequence_plan(experts)
    with pytest.raises(ValueError, match="GPT2LMHeadModel: its row-parallel layers are in blocks"):
        integration.sequence_plan(GPT2Config(n_layer=1, n_head=2, n_embd=8))


def test_other_versions_are_refused():
    patch = mock.patch.object(metadata, "version", lambda name: "5.3.1")
    said = r"transformers 5.3.1 is installed.*transformers 5.23.*pip install '.\[transformers\]'"
    with patch, pytest.raises(ImportError, match=said):
        integration.register()


def test_nothing_is_imported_before_it_is_asked_for():
    import subprocess

    code = (
        "import sys, overlap_torch\n"
        "early = {'torch._dynamo', 'torch.distributed.tensor'} & set(sys.modules)\n"
        "import overlap_torch.integrations.transformers\n"
        "sys.exit(bool(early) or 'transformers' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
