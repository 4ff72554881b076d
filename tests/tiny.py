"""A tiny random model, and a driver that runs hand-written plans on an executor."""

from collections.abc import Sequence

from ridgeline.core.arrays import cast
from ridgeline.core.config import EngineConfig
from ridgeline.core.plan import (
    Admission,
    BlockTableUpdate,
    ModelRole,
    Outputs,
    Pass,
    Segment,
    StepPlan,
    check_plan,
)
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors import create_executor
from ridgeline.executors.model import ExecutorModel
from ridgeline.models import describe, lower
from ridgeline.weights import dummy_weights

CONFIG = {
    "model_type": "llama",
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
WINDOWED = CONFIG | {"model_type": "mistral", "sliding_window": 9}
EXPERTS = CONFIG | {
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
}
LATENT = CONFIG | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
SINKS = CONFIG | {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "sliding_window": 9,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
GROWING = CONFIG | {
    "model_type": "ministral3",
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 5,
        "llama_4_scaling_beta": 0.3,
    },
}
CHUNKED = EXPERTS | {
    "model_type": "llama4_text",
    "head_dim": 8,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 9,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 5,
}
STREAMS = CONFIG | {
    "model_type": "gemma3n_text",
    "head_dim": 8,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 140,
    "num_kv_shared_layers": 0,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.6, 0.0, 0.8],
}
NORMED_LAST = CONFIG | {"model_type": "hunyuan_v1_dense"}
NORMED_INSIDE = CONFIG | {"model_type": "bitnet", "hidden_act": "relu2"}
SOFTCAPPED = WINDOWED | {
    "model_type": "gemma2",
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
}
GREEDY = SamplingParams(temperature=0.0)


def tiny_model(config=CONFIG, *, dtype="float64", seed=0, gain=3.0) -> ExecutorModel:
    """Random weights; a gain on the head makes logits far from flat, so tokens vary."""
    spec = describe(config).spec
    ops = lower(spec)
    weights = dummy_weights(ops, dtype=dtype, seed=seed)
    weights["head"] = cast(weights["head"] * gain, dtype)
    return ExecutorModel(spec=spec, ops=ops, weights=weights, dtype=dtype)


def tiny_executor(
    *, draft: ExecutorModel | None = None, model=None, num_blocks=64, block_tokens=4, make=None
):
    """``make(models, block_tokens)`` makes the executor; the reference without it."""
    models = {ModelRole.TARGET: model or tiny_model()}
    if draft is not None:
        models[ModelRole.DRAFT] = draft
    if make is None:
        executor = create_executor(
            models, EngineConfig(executor="reference", block_tokens=block_tokens)
        )
    else:
        executor = make(models, block_tokens)
    for role in models:
        groups = executor.kv_layout(role).block_bytes
        executor.allocate_kv([num_blocks] * len(groups), role)
    return executor


class Driver:
    """Gives each slot blocks of its own and counts steps; plans are otherwise the test's."""

    def __init__(self, executor, *, blocks_per_slot=16):
        self.executor = executor
        self.blocks_per_slot = blocks_per_slot
        self.step_id = 0

    def admit(self, slot: int, token_ids: Sequence[int], params=GREEDY, **fields) -> Admission:
        fields = {"num_prompt_tokens": len(token_ids), "seed": 0} | fields
        return Admission(slot=slot, token_ids=tuple(token_ids), params=params, **fields)

    def segment(self, slot, start, token_ids, *, outputs=None, fresh=False, **fields) -> Segment:
        """``fresh`` sends the slot's whole block table (in every KV group)."""
        updates = ()
        if fresh:
            first = slot * self.blocks_per_slot
            blocks = tuple(range(first, first + self.blocks_per_slot))
            layout = self.executor.kv_layout()
            updates = tuple(
                BlockTableUpdate(group=g, first=0, blocks=blocks) for g in range(len(layout.groups))
            )
            if layout.states is not None:
                running = BlockTableUpdate(group=len(layout.groups), first=0, blocks=blocks[:1])
                updates = (*updates, running)
        return Segment(
            slot=slot,
            start=start,
            stop=start + len(token_ids),
            token_ids=tuple(token_ids),
            outputs=outputs or Outputs(sample=True),
            block_updates=updates,
            **fields,
        )

    def submit(self, *segments: Segment, passes=None, **fields):
        self.step_id += 1
        passes = (Pass(segments=segments),) if passes is None else passes
        plan = StepPlan(step_id=self.step_id, passes=tuple(passes), **fields)
        check_plan(plan)
        return self.executor.submit(plan)

    def run(self, *segments: Segment, passes=None, **fields) -> StepResult:
        return self.submit(*segments, passes=passes, **fields).result()

    def start(self, slot, token_ids, params=GREEDY, outputs=None, **fields) -> SegmentResult:
        """Admit a sequence and compute its prompt in one step."""
        segment = self.segment(slot, 0, token_ids, fresh=True, outputs=outputs)
        result = self.run(segment, admissions=(self.admit(slot, token_ids, params, **fields),))
        return result.passes[0][0]

    def decode(self, slot, token_ids, count, params=GREEDY, **fields) -> list[int]:
        """The first ``count`` output tokens, one step each: the oracle of the other ways."""
        tokens = [*self.start(slot, token_ids, params, **fields).token_ids]
        while len(tokens) < count:
            position = len(token_ids) + len(tokens) - 1
            result = self.run(self.segment(slot, position, [tokens[-1]]))
            tokens += result.passes[0][0].token_ids
        return tokens
