"""Makes algo_reference.json: inputs from a fixed seed, and what verl 0.9.1 (and TRL 1.16) make of them.

The numbers come from other people's code, so that a mistake in ours cannot hide in the tests. The tests read the JSON
only. To make it again, in an environment of its own:

    python -m venv verl-venv
    verl-venv/bin/pip install torch==2.13.0
    verl-venv/bin/pip install --no-deps verl==0.9.1 trl==1.16.0
    verl-venv/bin/pip install numpy omegaconf hydra-core "tensordict>=0.8,<=0.10.0" "transformers<5.20" ray codetiming
    verl-venv/bin/python tests/data/make_algo_reference.py

Arrays are padded, [8 rows, 6 tokens]: two groups of four completions. Row 2 has a gap (a tool turn), row 5 has no
loss tokens. Everything is float64. A gradient is that of the loss with respect to the policy's log-probs (or values).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.rewards import get_soft_overlong_punishment
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

NO_DUAL_CLIP = 1e9  # verl's dual clip cannot be turned off, only moved out of reach
TOKEN_MEAN, ROW_MEAN, ROW_SUM = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"
MAX_TOKENS = 6

# name -> verl's loss, aggregation, clip_low, clip_high, dual clip; the names are the tests' own
POLICY_CASES = {
    "grpo": ("vanilla", ROW_MEAN, 0.2, 0.2, NO_DUAL_CLIP),
    "dr_grpo": ("vanilla", ROW_SUM, 0.2, 0.2, NO_DUAL_CLIP),
    "dapo": ("vanilla", TOKEN_MEAN, 0.2, 0.28, NO_DUAL_CLIP),
    "ppo_dual_clip": ("vanilla", TOKEN_MEAN, 0.2, 0.2, 3.0),
    "gspo": ("gspo", ROW_MEAN, 0.05, 0.08, NO_DUAL_CLIP),
    "cispo": ("cispo", TOKEN_MEAN, 1.0, 1.5, NO_DUAL_CLIP),
}


def make_inputs() -> SimpleNamespace:
    rng = np.random.default_rng(20260501)

    def draw(scale: float) -> Tensor:
        return torch.tensor(rng.normal(size=(8, MAX_TOKENS)).round(4) * scale, dtype=torch.float64)

    lengths = [6, 3, 6, 1, 5, 0, 4, 2]
    mask = torch.tensor([[float(t < length) for t in range(MAX_TOKENS)] for length in lengths], dtype=torch.float64)
    mask[2, 2:4] = 0
    logprobs = -draw(1.0).abs() - 0.05
    old = logprobs + draw(0.3)
    old[0, 1] = logprobs[0, 1] - 2.5  # ratio 12
    old[4, 0] = logprobs[4, 0] - 1.8  # ratio 6
    old[1, 0] = logprobs[1, 0] + 40.0  # outside the bound on the log-ratio
    advantages = draw(1.0)
    advantages[0, 1], advantages[4, 0] = -1.0, -0.5  # for the dual clip
    reference = logprobs + draw(0.7)
    reference[6, 0] = logprobs[6, 0] + 5.0  # k3 outside its bound
    return SimpleNamespace(
        mask=mask,
        group=[0, 0, 0, 0, 1, 1, 1, 1],
        rewards=torch.tensor([1.0, 0.0, 0.25, 1.0, -0.5, 0.75, 0.0, 2.0], dtype=torch.float64),
        logprobs=logprobs,
        old_logprobs=old,
        behaviour_logprobs=old + draw(0.6),
        reference_logprobs=reference,
        advantages=advantages,
        sequence_advantages=advantages[:, :1].expand(-1, MAX_TOKENS).contiguous(),
        entropy=draw(1.0).abs(),
        values=draw(0.5),
        old_values=draw(0.5),
        returns=draw(1.0),
    )


def token_scores(inputs: SimpleNamespace) -> Tensor:
    scores = torch.zeros_like(inputs.mask)
    for row, mask in enumerate(inputs.mask):
        if mask.any():
            scores[row, int(mask.nonzero()[-1])] = inputs.rewards[row]
    return scores


def make_advantages(inputs: SimpleNamespace) -> dict[str, Any]:
    mask, group = inputs.mask, np.array(inputs.group)
    # verl sums token rewards per row, and a row without loss tokens has none to put its reward on: column 0 serves.
    outcome = torch.zeros_like(mask)
    outcome[:, 0] = inputs.rewards
    k3 = core_algos.kl_penalty(inputs.old_logprobs, inputs.reference_logprobs, "k3") * mask
    with_kl = core_algos.compute_rewards(token_scores(inputs), inputs.old_logprobs, inputs.reference_logprobs, 0.1)
    out: dict[str, Any] = {
        "kl_coef": 0.1,
        "grpo": core_algos.compute_grpo_outcome_advantage(outcome, mask, group)[0],
        "grpo_kl_k3_in_reward": core_algos.compute_grpo_outcome_advantage(outcome - 0.1 * k3, mask, group)[0],
        "dr_grpo": core_algos.compute_grpo_outcome_advantage(outcome, mask, group, norm_adv_by_std_in_grpo=False)[0],
        "rloo": core_algos.compute_rloo_outcome_advantage(outcome, mask, group)[0],
        "reinforce_pp": [],
        "gae": [],
    }
    for gamma in (1.0, 0.9):
        advantages, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            with_kl, mask, config=AlgoConfig(gamma=gamma)
        )
        out["reinforce_pp"].append({"gamma": gamma, "advantages": advantages, "returns": returns})
    for gamma, lam in ((1.0, 0.95), (0.9, 0.5), (1.0, 1.0)):
        advantages, returns = core_algos.compute_gae_advantage_return(with_kl, inputs.values, mask, gamma, lam)  # type: ignore[arg-type]
        out["gae"].append({"gamma": gamma, "lam": lam, "advantages": advantages * mask, "returns": returns * mask})
    return out


def make_corrections(inputs: SimpleNamespace) -> dict[str, Any]:
    log_ratio = inputs.old_logprobs - inputs.behaviour_logprobs
    weights = rollout_corr_helper.compute_rollout_correction_weights
    icepop = weights(log_ratio, inputs.mask, rollout_is="token", rollout_is_threshold="0.5_1.5")[0]
    return {
        "cap": 2.0,
        "truncated": weights(log_ratio, inputs.mask, rollout_is="token", rollout_is_threshold=2.0)[0],
        "bounds": [0.5, 1.5],
        "kept": (icepop > 0).double(),
        "icepop": icepop,
    }


def make_policy_losses(inputs: SimpleNamespace, truncated: Tensor) -> dict[str, Any]:
    out = {}
    for name, (loss_name, aggregation, low, high, dual_clip) in POLICY_CASES.items():
        config = ActorConfig(
            strategy="fsdp", rollout_n=4, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=8, use_dynamic_bsz=False,
            clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual_clip, loss_agg_mode=aggregation,
        )  # fmt: skip
        config.global_batch_info["loss_scale_factor"] = MAX_TOKENS
        advantages = inputs.sequence_advantages if name == "gspo" else inputs.advantages
        case: dict[str, Any] = {
            "clip_low": low, "clip_high": high, "dual_clip": None if dual_clip == NO_DUAL_CLIP else dual_clip,
        }  # fmt: skip
        for key, correction in (("plain", None), ("truncated", truncated)):
            logprobs = inputs.logprobs.clone().requires_grad_()
            loss, metrics = core_algos.get_policy_loss_fn(loss_name)(
                inputs.old_logprobs, logprobs, advantages, inputs.mask, aggregation, config, correction
            )
            loss.backward()
            case[key] = {
                "loss": loss,
                "grad": logprobs.grad,
                "clip_fraction": metrics["actor/pg_clipfrac"],
                "dual_clip_fraction": metrics["actor/pg_clipfrac_lower"],
                "approx_kl": metrics["actor/ppo_kl"],
            }
            # The whole objective, from verl's parts: surrogate + 0.05 * KL - 0.01 * entropy
            for estimator in ("k1", "k2", "k3") if key == "truncated" else ():
                whole = inputs.logprobs.clone().requires_grad_()
                surrogate, _ = core_algos.get_policy_loss_fn(loss_name)(
                    inputs.old_logprobs, whole, advantages, inputs.mask, aggregation, config, correction
                )
                scale = {"loss_scale_factor": MAX_TOKENS}
                kl = core_algos.kl_penalty(whole, inputs.reference_logprobs, estimator)
                total = surrogate + 0.05 * core_algos.agg_loss(kl, inputs.mask, aggregation, **scale)
                total = total - 0.01 * core_algos.agg_loss(inputs.entropy, inputs.mask, aggregation, **scale)
                total.backward()
                case[f"whole_{estimator}"] = {"loss": total, "grad": whole.grad}
        out[name] = case
    return out


def make_kl(inputs: SimpleNamespace) -> dict[str, Any]:
    out = {}
    for estimator in ("k1", "k2", "k3"):
        logprobs = inputs.logprobs.clone().requires_grad_()
        kl = core_algos.kl_penalty(logprobs, inputs.reference_logprobs, estimator)
        kl.sum().backward()
        out[estimator] = {"kl": kl, "grad": logprobs.grad}
    return out


def make_value_losses(inputs: SimpleNamespace) -> list[dict[str, Any]]:
    out = []
    for clip in (0.2, 0.5, None):
        values = inputs.values.clone().requires_grad_()
        loss, clip_fraction = core_algos.compute_value_loss(
            values, inputs.returns, inputs.old_values, inputs.mask, 1e9 if clip is None else clip
        )
        loss.backward()
        out.append({"clip": clip, "loss": loss, "grad": values.grad, "clip_fraction": clip_fraction})
    return out


def make_aggregations(inputs: SimpleNamespace) -> dict[str, Any]:
    return {
        mode: core_algos.agg_loss(inputs.advantages, inputs.mask, mode, loss_scale_factor=MAX_TOKENS)
        for mode in (TOKEN_MEAN, ROW_MEAN, ROW_SUM)
    }


def make_overlong() -> dict[str, Any]:
    lengths = [0, 10, 79, 80, 81, 90, 99, 100]
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    completions = [[0] * length for length in lengths]
    return {"max_tokens": 100, "buffer": 20, "lengths": lengths, "penalties": punish(completion_ids=completions)}


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def main() -> None:
    inputs = make_inputs()
    corrections = make_corrections(inputs)
    reference = {
        "made_by": "tests/data/make_algo_reference.py with verl 0.9.1, trl 1.16.0 and torch 2.13.0",
        "inputs": vars(inputs),
        "advantages": make_advantages(inputs),
        "corrections": corrections,
        "policy": make_policy_losses(inputs, corrections["truncated"]),
        "kl": make_kl(inputs),
        "value": make_value_losses(inputs),
        "aggregation": make_aggregations(inputs),
        "overlong": make_overlong(),
    }
    path = Path(__file__).with_name("algo_reference.json")
    path.write_text(json.dumps(plain(reference), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
