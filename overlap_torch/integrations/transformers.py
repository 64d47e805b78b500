"""Hugging Face transformers with this package's ops: tensor parallelism (``tp_plan="auto"`` and plans by hand), and
attention of a cut sequence."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from overlap_torch._attention.cuts import Documents, Tokens
from overlap_torch._ops.group import Group
from overlap_torch._ops.handles import Handle, Held
from overlap_torch.integrations._release import require

__all__ = [
    "AttentionRegistration", "NormFusion", "Registration", "fuse_norms", "register",
    "register_attention", "sequence_plan",
]  # fmt: skip

RELEASES = ("5.21", "5.22", "5.23", "5.24")

_held: dict[str, Held] = {}  # entries of transformers' registries, by name
_registering = threading.Lock()


class Registration(Handle):
    """The result of :func:`register`: undoes it, once, by :meth:`undo` or at the end of a ``with``. Models keep the styles they have."""


def _entry(registry: Any, name: str, value: Any) -> Held:
    """A registry's entry; at its end the one that was there before comes back."""
    before: list[Any] = []

    def put() -> None:
        before.append(registry._global_mapping.get(name))
        registry.register(name, value)

    def take() -> None:
        if (theirs := before.pop()) is None:
            registry._global_mapping.pop(name, None)
        else:
            registry.register(name, theirs)

    return Held(put, take)


def _hold(held: Sequence[Held]) -> Callable[[], None]:
    """Puts entries into their registries; the result takes them out."""
    for each in held:
        each.hold()
    return lambda: [each.release() for each in held]


def register(*, auto: bool = True) -> Registration:
    """Adds this package's styles to ``transformers``' ``ALL_PARALLEL_STYLES``; then load models as usual::

        overlap_torch.integrations.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_plan="auto"))

    ``overlap_colwise``, ``overlap_colwise_gather_output``, ``overlap_rowwise`` and ``overlap_rowwise_split_input`` equal
    transformers' styles without ``overlap_``: the same parameters, inputs and outputs, with the all-reduces, of outputs forward
    and of inputs' gradients backward, beside the GEMMs. ``overlap_sequence``, ``overlap_sequence_norm``,
    ``overlap_sequence_input`` and ``overlap_rowwise_sequence`` cut the tokens over the ranks between the blocks;
    :func:`sequence_plan` makes a plan of them.

    From transformers 5.23 on, with ``DistributedConfig(ep_size=..., ep_implementation="overlap")`` the experts of a mixture
    exchange their tokens by :func:`overlap_torch.moe`, or by :func:`overlap_torch.moe_dispatch` and
    :func:`overlap_torch.moe_combine` around their own forward. A token goes once to a rank.

    A layer that is not a plain ``torch.nn.Linear``, such as a quantized one, takes transformers' own style;
    ``overlap_torch.report(model)`` names it.

    Args:
        auto: True also gives these styles transformers' own names, which are in models' plans: ``colwise``,
            ``colwise_rep``, ``colwise_gather_output``, ``rowwise``, ``rowwise_rep`` and ``rowwise_split_input``.

    Returns:
        A handle: ``undo()``, or the end of a ``with`` block, takes the styles out. A second call of this function returns another
        handle; the last of them to be undone ends it.

    Raises:
        ImportError: transformers is not installed, or of a release other than 5.21 to 5.24.
    """
    require("transformers", RELEASES, "transformers")
    from overlap_torch.integrations import _transformers_styles as styles

    with _registering:
        found = styles.named() | (styles.in_place_of_transformers() if auto else {})
        entries = [(styles.REGISTRY, name, style) for name, style in found.items()]
        if (experts := _experts()) is not None:
            entries.append((experts.REGISTRY, experts.NAME, experts.OverlapEP))
        for registry, name, value in entries:
            if not _held.get(name):  # styles are made of those that transformers has now
                _held[name] = _entry(registry, name, value)
        return Registration(_hold([_held[name] for _, name, _ in entries]))


def _experts() -> ModuleType | None:
    """The module of expert parallelism; None for releases without a choice of implementations."""
    name = "transformers.distributed.expert_parallel"
    if importlib.util.find_spec(name) is None:
        return None
    if not hasattr(importlib.import_module(name), "EPImplementationInterface"):
        return None
    from overlap_torch.integrations import _transformers_experts

    return _transformers_experts


def sequence_plan(model: Any) -> dict[str, str]:
    """A ``tp_plan`` that divides the tokens among the ranks between a causal model's blocks.

    Norms and residuals are then computed on this rank's tokens. The input of an attention or an MLP
    is gathered once beside the GEMMs that read it, and its output is reduce-scattered beside its
    GEMM, forward and backward; the head gathers the last hidden states beside its GEMM.
    :func:`register` must have been called before the plan is used::

        config = AutoConfig.from_pretrained(name)
        plan = overlap_torch.integrations.transformers.sequence_plan(config)
        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_plan=plan))

    It is for training, because a step of generation has only one token. Hidden states that the model returns are DTensors.

    Args:
        model: a ``PreTrainedModel``, or the ``PretrainedConfig`` of a causal language model. Its own plan must have only
            column- and row-parallel linears in the layers' blocks, with norms beside the blocks, as in Llama, Mistral and
            Qwen3.

    Raises:
        ValueError: a model of another kind; the message names the unknown part.
        ImportError: as :func:`register`.
    """
    require("transformers", RELEASES, "transformers")
    from overlap_torch.integrations import _transformers_styles as styles

    return styles.sequence_plan(model)


class NormFusion(Handle):
    """The result of :func:`fuse_norms`: undoes it, once, by :meth:`undo` or at the end of a ``with``."""


# Decoder layers of Llama's form: norm, attention, addition, norm, MLP, addition, and nothing else.
_LLAMA_FORM = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


def fuse_norms(model: Any) -> NormFusion:
    """Makes decoding compute all-reduce, residual and RMSNorm of each half layer by
    :func:`overlap_torch.gemm_allreduce_rmsnorm`::

        overlap_torch.integrations.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_plan="auto"))
        overlap_torch.integrations.transformers.fuse_norms(model)
        model.generate(...)

    It serves eager calls of at most 512 rows in bfloat16 or float16 without gradients. Other calls run as the model says,
    and ``overlap_torch.report(model).notes`` counts both, with the reason. Compiled models need only the compile pass. On
    CPU results have the model's own bits; on GPUs a kernel adds the ranks' terms in rank order.

    Args:
        model: a causal language model of Llama, Mistral, Qwen2 or Qwen3, loaded after :func:`register` with its own plan.

    Returns:
        A handle: ``undo()``, or the end of a ``with`` block, gives the model its own forwards back.

    Raises:
        ValueError: a model of another kind, or one with row-parallel linears that have biases or are not this package's.
            The message names the part.
        ImportError: as :func:`register`.
    """
    require("transformers", RELEASES, "transformers")
    from overlap_torch.integrations import _norms

    trunk = getattr(model, getattr(model, "base_model_prefix", ""), model)
    layers = list(getattr(trunk, "layers", ()))
    kinds = sorted({type(layer).__name__ for layer in layers})
    whys = ["its norms are fused already" for each in layers if isinstance(each, _norms.Layer)]
    if not layers or not set(kinds) <= set(_LLAMA_FORM):
        whys = [f"its layers are {', '.join(kinds) or 'unknown'}, not {', '.join(_LLAMA_FORM)}"]
    whys = [*whys, *filter(None, map(_norms.refused, () if whys else layers))]
    if whys:
        raise ValueError(
            f"fuse_norms does not take {type(model).__name__}: {whys[0]}. It is for a model that was loaded after register() with its own plan"
        )
    return NormFusion(_norms.Fusion(layers, trunk.norm).undo)


class AttentionRegistration(Handle):
    """The result of :func:`register_attention`. :meth:`undo`, or the end of a ``with``, takes the attention out, once.

    Attributes:
        documents: an :class:`overlap_torch.Documents` of the whole sequence, or None; set it before each batch with other
            documents.
    """

    def __init__(self, undo: Callable[[], None], attention: Any) -> None:
        super().__init__(undo)
        self._attention = attention

    @property
    def documents(self) -> Documents | None:
        return self._attention.documents

    @documents.setter
    def documents(self, documents: Documents | None) -> None:
        self._attention.documents = documents


def register_attention(
    group: Group = None,
    *,
    tokens: Tokens = "contiguous",
    documents: Documents | None = None,
    head_parts: int | None = None,
    name: str = "overlap",
) -> AttentionRegistration:
    """Adds the attention ``name`` for models whose tokens are divided among the ranks of ``group``::

        overlap_torch.integrations.transformers.register_attention(tokens="zigzag")
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="overlap")
        logits = model(
            input_ids=overlap_torch.cut_tokens(ids, 1, "zigzag"),
            position_ids=overlap_torch.token_positions(ids.shape[1], "zigzag")[None],
            use_cache=False,
        ).logits                                   # those of this rank's tokens

    The caller cuts ids, positions and labels; a loss of next tokens needs labels that are shifted before the cut. Gradients
    of weights are this rank's terms, as with data parallelism: sum them over the group.

    It takes causal and full masks, and documents given here or by the result's ``documents``. Errors name what it does not
    take: padding, mask tensors, sliding windows, packed documents that only ``position_ids`` show, dropout, sinks, soft
    caps, caches.

    Args:
        tokens, documents, head_parts, group: as :func:`overlap_torch.context_parallel_attention`.
        name: the name for ``attn_implementation``.

    Raises:
        ValueError: transformers already has an attention of this name.
        ImportError: as :func:`register`.
    """
    require("transformers", RELEASES, "transformers")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from overlap_torch.integrations._transformers_attention import CutAttention

    if name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise ValueError(
            f"transformers has an attention {name!r}: give another name=, or undo() the one that has it"
        )
    attention = CutAttention(group, tokens, documents, head_parts)
    entries = (
        (ALL_ATTENTION_FUNCTIONS, attention.attention),
        (ALL_MASK_ATTENTION_FUNCTIONS, attention.mask),
    )
    held = [_entry(registry, name, function) for registry, function in entries]
    return AttentionRegistration(_hold(held), attention)
