"""The models that the cases train, and the batches that they see; small and of awkward sizes."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_cases import Recipe

# Megatron-core 0.16 forgets this name where Transformer Engine is missing, and then fails in MoE.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None

VOCAB_SIZE = 128
SEQUENCE_LENGTH = 16
BATCH_SIZE = 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class PlainModel(MegatronModule):
    """No size is a multiple of 64; one tensor has one element, two have several thousand."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, 37)
        self.first = torch.nn.Linear(37, 53)
        self.second = torch.nn.Linear(53, 29)
        self.gain = torch.nn.Parameter(torch.empty(1))
        self.mix = torch.nn.Linear(29, 31)
        self.wide = torch.nn.Linear(31, 211)
        self.spare = torch.nn.Linear(19, 71)  # takes part only where no gradient may be missing

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, use_spare: bool) -> torch.Tensor:
        """Return the loss."""
        embedded = self.embedding(tokens).mean(1)
        hidden = torch.tanh(self.first(embedded.to(self.first.weight.dtype)))
        hidden = self.second(hidden) * self.gain
        mixed = torch.tanh(self.mix(hidden.to(self.mix.weight.dtype)))
        wide = self.wide(mixed.to(self.wide.weight.dtype))
        loss = F.cross_entropy(wide.float(), labels[:, 0])
        if use_spare:
            loss = loss + self.spare(hidden[:, :19]).float().square().mean()
        return loss


def build_model(recipe: Recipe) -> MegatronModule:
    """Build the recipe's model with the same values every time it is asked for."""
    config = _config(recipe)
    if recipe.model == "plain":
        model: Any = PlainModel(config)
    else:
        experts = 4 if recipe.model == "moe" else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(experts, False),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=SEQUENCE_LENGTH,
            share_embeddings_and_output_weights=True,
        )
    model.to(DTYPES[recipe.dtype])
    if recipe.params == "fp32":
        model.mix.float()
        model.embedding.float()
    for name, param in model.named_parameters():
        _fill(name, param)
    return model


def loss_of(model: Any, recipe: Recipe, step: int, micro_batch: int) -> torch.Tensor:
    """Run one micro-batch forward and return its loss."""
    tokens, labels = _batch(recipe, step, micro_batch)
    device = next(model.parameters()).device
    tokens, labels = tokens.to(device), labels.to(device)
    if recipe.model == "plain":
        return model(tokens, labels, use_spare=recipe.params != "unused")
    positions = torch.arange(SEQUENCE_LENGTH, device=device).expand_as(tokens)
    mask = torch.ones(SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool, device=device).triu(1)
    return model(tokens, positions, mask[None, None], labels=labels).float().mean()


def _config(recipe: Recipe) -> TransformerConfig:
    moe = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "allgather",  # gloo has no all-to-all
        "moe_aux_loss_coeff": 0.01,
        "add_bias_linear": False,
        "expert_model_parallel_size": 2 if recipe.parallel == "ep2" else 1,
    }
    return TransformerConfig(
        num_layers=2,
        hidden_size=36,
        ffn_hidden_size=52,
        num_attention_heads=4,
        tensor_model_parallel_size=2 if recipe.parallel == "tp2" else 1,
        params_dtype=DTYPES[recipe.dtype],
        bf16=recipe.dtype == "bf16",
        fp16=recipe.dtype == "fp16",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        # These fusions are kernels of Apex or Transformer Engine, or compiled by torch.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        # One tensor that stands for two global ones: gate and projection of a gated MLP.
        gated_linear_unit=True,
        activation_func=F.silu,
        **(moe if recipe.model == "moe" else {}),
    )


def _fill(name: str, param: torch.nn.Parameter) -> None:
    """Set a parameter to values that depend on its name and on what this rank's part of it is."""
    place = [name]
    if getattr(param, "tensor_model_parallel", False):
        place.append(str(parallel_state.get_tensor_model_parallel_rank()))
    if not getattr(param, "allreduce", True):
        place.append(str(parallel_state.get_expert_model_parallel_rank()))
    random = torch.Generator().manual_seed(zlib.crc32("/".join(place).encode()))
    values = torch.randn(param.shape, generator=random) * (0.3 if param.dim() > 1 else 0.1)
    if name == "gain" or ("norm" in name and name.endswith("weight")):
        values += 1
    param.data.copy_(values)


def _batch(recipe: Recipe, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank = parallel_state.get_data_parallel_rank()
    random = torch.Generator().manual_seed(1 + rank + 2 * (micro_batch + 4 * step))
    shape = (BATCH_SIZE, SEQUENCE_LENGTH + 1)
    tokens = torch.randint(0, VOCAB_SIZE, shape, generator=random)
    return tokens[:, :-1], tokens[:, 1:]
