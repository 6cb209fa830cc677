"""Train the small real model pair that the tests and the demo run: a Kimi-shaped MLA target and its DFlash drafter.

    python -m tools.train_pair --out tests/fixtures/pair --target-minutes 24 --drafter-minutes 16

Text is that of `tools/pair.py`. The target is transformers' DeepseekV3ForCausalLM; the drafter is that of
`tools/dflash.py`, written in the checkpoint format that SGLang loads.

Needs torch, transformers, tokenizers and safetensors (tools/requirements-cpu.txt has them). Learning rates follow the
clock, so a run takes the minutes it is given; the steps it made are in `training.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

from tools import checkpoints, dflash, pair
from tools.dflash import BLOCK_SIZE, TARGET_LAYER_IDS, Drafter, draft_logits, target_features

END, MASK = "<|endoftext|>", "<|mask|>"
VOCAB_SIZE = 2048
WINDOW = 256
ROPE = checkpoints.rope(131_072)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the two special tokens at ids 0 and 1."""
    bpe = checkpoints.byte_level_bpe(texts, VOCAB_SIZE, [END, MASK])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, mask_token=MASK, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts as one int64 stream, each after an END token."""
    end = tokenizer.eos_token_id
    return torch.tensor([t for e in tokenizer(texts)["input_ids"] for t in (end, *e)])


def windows(stream: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless [batch, length] windows; each epoch shuffles and starts at another offset."""
    rng = random.Random(seed)
    while True:
        offset = rng.randrange(length)
        starts = list(range(offset, len(stream) - length, length))
        rng.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            yield torch.stack([stream[s : s + length] for s in starts[i : i + batch]])


def target_config() -> DeepseekV3Config:
    """A small model with Kimi K2's attention geometry: latent 512, rope 64, 8 heads, sigmoid-routed experts."""
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=131072,
        rope_parameters=ROPE,
        bos_token_id=0,
        eos_token_id=0,
        num_mtp_layers=0,
        experts_implementation="eager",
        attn_implementation="sdpa",
    )


class Clock:
    """Fraction of a time budget that has passed, and the learning rate that goes with it."""

    def __init__(self, minutes: float) -> None:
        self.begin, self.seconds = time.monotonic(), minutes * 60

    @property
    def fraction(self) -> float:
        """Passed time over the whole; 1 or more when time is up."""
        return (time.monotonic() - self.begin) / self.seconds

    def rate(self, peak: float) -> float:
        """Warm up over 2% of the time, hold, then fall linearly to zero over the last 60%."""
        return peak * min(1.0, self.fraction / 0.02 + 0.01, max(0.0, (1 - self.fraction) / 0.6))


class Optimizer:
    """Muon for matrices inside the layers, AdamW for the rest."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float) -> None:
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, p in model.named_parameters():
            if p.requires_grad:
                (matrices if p.ndim == 2 and "embed" not in name and "lm_head" not in name else rest).append(p)
        self.parameters = matrices + rest
        self.parts = [
            (torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"), muon_rate),
            (torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.02), adam_rate),
        ]

    def step(self, loss: Tensor, clock: Clock) -> None:
        """Backward and one update at the rate of this moment."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part, peak in self.parts:
            for group in part.param_groups:
                group["lr"] = clock.rate(peak)
            part.step()
            part.zero_grad(set_to_none=True)


def token_loss(model: DeepseekV3ForCausalLM, ids: Tensor) -> Tensor:
    """Mean cross entropy in nats of ids [B, T] after their first token."""
    logits = model(ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def balance_experts(model: DeepseekV3ForCausalLM, loads: list[Tensor], rate: float) -> None:
    """The bias update of noaux_tc routing: raise the bias of under-used experts, lower that of over-used ones."""
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    for gate, load in zip(gates, loads, strict=True):
        gate.e_score_correction_bias += rate * torch.sign(load.float().mean() - load)
    loads.clear()


def train_target(train: Tensor, valid: Tensor, minutes: float, batch: int, seed: int) -> tuple[Any, dict]:
    """Train from scratch; returns the model and its figures."""
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(target_config())
    for name, p in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            nn.init.normal_(p, std=0.02)
    loads: list[Tensor] = []
    experts = model.config.n_routed_experts
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda _m, _i, out: loads.append(torch.bincount(out[2].flatten(), minlength=experts))
            )
    optimizer, clock, losses = Optimizer(model, 0.006, 0.003), Clock(minutes), []
    for step, ids in enumerate(windows(train, batch, WINDOW + 1, seed)):
        if clock.fraction >= 1:
            break
        loss = token_loss(model, ids)
        optimizer.step(loss, clock)
        balance_experts(model, loads, 0.002)
        losses.append(loss.item())
        if step % 20 == 0:
            print(
                f"target {clock.fraction:6.1%} step {step} loss {sum(losses[-20:]) / len(losses[-20:]):.3f}", flush=True
            )
    with torch.no_grad():
        checks = [
            token_loss(model.eval(), ids).item()
            for _, ids in zip(range(8), windows(valid, 8, WINDOW + 1, 0), strict=False)
        ]
    report = {"steps": step, "tokens": step * batch * WINDOW, "held_out_loss_nats": sum(checks) / len(checks)}
    print("target", report, flush=True)
    return model, report


def save_target(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write bf16 weights, the tokenizer, and a config.json that also has the older keys that SGLang reads."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    checkpoints.finish_config(out, ROPE, torch_dtype="bfloat16")


def drafter_config(target: dict, mask_id: int) -> dict:
    """config.json of a DFlash checkpoint for this target."""
    config = checkpoints.dflash_config(
        target,
        block_size=BLOCK_SIZE,
        mask_token_id=mask_id,
        target_layer_ids=TARGET_LAYER_IDS,
        intermediate_size=384,
        layers=4,
        heads=4,
        head=64,
    )
    return config | {"bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "bfloat16"}


@torch.no_grad()
def continue_texts(model: DeepseekV3ForCausalLM, prompts: Tensor, length: int, temperature: float) -> Tensor:
    """[N, length]: prompts [N, P] continued by the target, greedily at temperature 0. END is an ordinary token here.

    Attention is absorbed over a latent cache, as a server does it: transformers would expand the whole cache each step.
    """
    batch, first = prompts.shape
    ids = torch.cat([prompts, prompts.new_zeros(batch, length - first)], dim=1)
    attention = [layer.self_attn for layer in model.model.layers]
    caches = [torch.zeros(batch, length, a.kv_lora_rank + a.qk_rope_head_dim) for a in attention]
    cos, sin = model.model.rotary_emb(caches[0], torch.arange(length)[None])
    for t in range(length - 1):
        hidden = model.model.embed_tokens(ids[:, t])
        for layer, cache in zip(model.model.layers, caches, strict=True):
            normed = layer.input_layernorm(hidden)
            hidden = hidden + absorbed_attention(
                layer.self_attn, normed, cache, t, cos[:, t : t + 1], sin[:, t : t + 1]
            )
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden)[:, None])[:, 0]
        if t + 1 >= first:
            logits = model.lm_head(model.model.norm(hidden))
            if temperature > 0:
                ids[:, t + 1] = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
            else:
                ids[:, t + 1] = logits.argmax(-1)
    return ids


def absorbed_attention(a: Any, hidden: Tensor, cache: Tensor, t: int, cos: Tensor, sin: Tensor) -> Tensor:
    """One decode step of an MLA module for hidden [N, H]; writes position t of cache [N, T, latent + rope]."""
    q = a.q_b_proj(a.q_a_layernorm(a.q_a_proj(hidden))).unflatten(-1, (a.num_heads, a.qk_head_dim))
    q_nope, q_rope = q.split([a.qk_nope_head_dim, a.qk_rope_head_dim], dim=-1)
    latent, k_rope = a.kv_a_proj_with_mqa(hidden).split([a.kv_lora_rank, a.qk_rope_head_dim], dim=-1)
    q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope[:, :, None], k_rope[:, None, None], cos, sin)
    cache[:, t] = torch.cat([a.kv_a_layernorm(latent), k_rope[:, 0, 0]], dim=-1)
    w_key, w_value = a.kv_b_proj.weight.unflatten(0, (a.num_heads, -1)).split([a.qk_nope_head_dim, a.v_head_dim], dim=1)
    query = torch.cat([torch.einsum("nhd,hdl->nhl", q_nope, w_key), q_rope[:, :, 0]], dim=-1)
    past = cache[:, : t + 1]
    weights = torch.softmax(query @ past.transpose(1, 2) * a.scaling, dim=-1)
    values = torch.einsum("nhl,hdl->nhd", weights @ past[:, :, : a.kv_lora_rank], w_value)
    return a.o_proj(values.flatten(1))


def after_anchors(x: Tensor, anchors: Tensor, shift: int) -> Tensor:
    """x [B, T, ...] gathered at anchor + shift + (0 .. block - 2): [B, A, block - 1, ...]."""
    return x[:, anchors[:, None] + shift + torch.arange(BLOCK_SIZE - 1)]


def draft_loss(drafter: Drafter, model: Any, ids: Tensor, anchors: Tensor) -> Tensor:
    """Cross entropy against the target's own distribution, early positions counting more: they gate the later ones."""
    features, logits = target_features(model, ids)
    teacher = after_anchors(logits, anchors, 0).float().softmax(-1)
    predicted = draft_logits(drafter, model, ids, anchors, features).float().log_softmax(-1)
    weight = torch.exp(-torch.arange(BLOCK_SIZE - 1) / 4)
    return ((-(teacher * predicted).sum(-1)).mean((0, 1)) * weight).sum() / weight.sum()


@torch.no_grad()
def chain_accept_length(drafter: Drafter, model: Any, ids: Tensor, begin: int) -> float:
    """Mean committed tokens a step as `ids` [B, T], greedy text of the target from `begin` on, is drafted greedily."""
    anchors = torch.arange(begin, ids.shape[1] - BLOCK_SIZE)
    features, _ = target_features(model, ids)
    right = draft_logits(drafter, model, ids, anchors, features).argmax(-1) == after_anchors(ids, anchors, 1)
    accepted = right.cumprod(-1).sum(-1)
    steps = committed = 0
    for row in accepted.tolist():
        at = 0
        while at < len(row):
            steps, committed, at = steps + 1, committed + row[at] + 1, at + row[at] + 1
    return committed / steps


def train_drafter(
    model: Any, train: Tensor, valid: Tensor, minutes: float, generate_minutes: float, batch: int, seed: int
) -> tuple[Drafter, dict]:
    """Train on the target's own continuations of training text, half of them greedy."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    mask_id = 1
    drafter = Drafter(drafter_config(model.config.to_dict(), mask_id))
    rounds: list[Tensor] = []
    prompt, clock = 32, Clock(generate_minutes)
    for i, prompts in enumerate(windows(train, 192, prompt, seed)):
        if clock.fraction >= 1 and len(rounds) > 1:
            break
        rounds.append(continue_texts(model, prompts, WINDOW, temperature=0.8 * (i % 2)))
        print(f"continuations {clock.fraction:6.1%}: {sum(map(len, rounds))} x {WINDOW} tokens", flush=True)
    texts = torch.cat(rounds)
    checks = continue_texts(model, next(windows(valid, 48, 64, 0)), WINDOW, temperature=0)
    optimizer, clock, losses, step = Optimizer(drafter, 0.006, 0.003), Clock(minutes), [], 0
    while clock.fraction < 1:
        for rows in torch.randperm(len(texts)).split(batch):
            if clock.fraction >= 1:
                break
            anchors = torch.randperm(WINDOW - BLOCK_SIZE - 8)[:40].sort().values + 8
            loss = draft_loss(drafter, model, texts[rows], anchors)
            optimizer.step(loss, clock)
            losses.append(loss.item())
            step += 1
            if step % 50 == 0:
                accept = chain_accept_length(drafter, model, checks, 64) if step % 250 == 0 else float("nan")
                recent = sum(losses[-50:]) / 50
                print(f"drafter {clock.fraction:6.1%} step {step} loss {recent:.3f} accept {accept:.2f}", flush=True)
    report = {
        "steps": step,
        "continuation_tokens": texts.numel(),
        "held_out_chain_accept_length": chain_accept_length(drafter, model, checks, 64),
    }
    print("drafter", report, flush=True)
    return drafter, report


def main() -> None:
    """Train what the flags ask for and write it to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, drafter/ and training.json")
    parser.add_argument("--target-minutes", type=float, default=24)
    parser.add_argument("--generate-minutes", type=float, default=4, help="time for the target to write training text")
    parser.add_argument("--drafter-minutes", type=float, default=16)
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {WINDOW} tokens a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-target", action="store_true", help="train only a new drafter for the target in --out")
    args = parser.parse_args()

    train_texts, valid_texts = pair.texts(training=True), pair.texts(training=False)
    report_path = args.out / "training.json"
    target_dir = args.out / "target"
    if args.keep_target:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(target_dir)
        report = json.loads(report_path.read_text())
    else:
        tokenizer, report = train_tokenizer(train_texts), {"seed": args.seed, "python": sysconfig.get_python_version()}
    train, valid = encode(tokenizer, train_texts), encode(tokenizer, valid_texts)
    print(f"{len(train_texts)} files, {len(train):,} training tokens, {len(valid):,} held out", flush=True)
    if not args.keep_target:
        model, report["target"] = train_target(train, valid, args.target_minutes, args.batch, args.seed)
        save_target(model, tokenizer, target_dir)
        report_path.write_text(json.dumps(report, indent=2) + "\n")
    model = DeepseekV3ForCausalLM.from_pretrained(
        target_dir, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    drafter, report["drafter"] = train_drafter(
        model, train, valid, args.drafter_minutes, args.generate_minutes, args.batch, args.seed
    )
    dflash.save(drafter, args.out / "drafter", torch.bfloat16)
    report_path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
