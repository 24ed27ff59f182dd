"""Train the demo model: `python -m deploy.models.train --out deploy/models/quire-demo`.

Needs torch and numpy; with `tokenizers` it also prints samples, with `transformers` it compares logits.
The budget is time (`--minutes`): the learning rate follows a cosine over it, and the last fifth trains on
sequences of 2048 tokens. `--minutes 0` writes random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deploy.models.llama import Llama, LlamaShape, save_safetensors

NO_LOSS_BIT = 0x8000
IGNORED = -100
END_OF_TEXT_ID, TURN_END_ID = 0, 2
SHORT_TOKENS, LONG_TOKENS = 1024, 2048
LONG_FROM_PROGRESS = 0.8
PROMPTS = (
    "hello", "Who are you?", "What does os.path.join do?", "What is json.dumps for?",
    "Explain the with statement.", "Which module has deque?", "Count to 20.", "What is Quire?",
)  # fmt: skip


class Batches:
    """Random windows of the packed stream, each starting where a document or chat starts."""

    def __init__(self, stream: np.ndarray, *, seed: int, device: torch.device) -> None:
        self._stream = torch.from_numpy(stream.astype(np.int32)).to(device)
        ends = np.flatnonzero((stream & ~np.uint16(NO_LOSS_BIT)) == END_OF_TEXT_ID)
        starts = np.concatenate([[0], ends[:-1] + 1])
        self._starts = torch.from_numpy(starts.astype(np.int64)).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [rows, tokens]; the window wraps round at the stream's end."""
        device = self._stream.device
        picks = torch.randint(len(self._starts), (rows,), generator=self._generator, device=device)
        positions = self._starts[picks, None] + torch.arange(tokens + 1, device=device)
        window = self._stream[positions % len(self._stream)].long()
        ids = window & (NO_LOSS_BIT - 1)
        targets = torch.where(window >= NO_LOSS_BIT, IGNORED, ids)
        return ids[:, :-1], targets[:, 1:]


class Trainer:
    """One model, its optimizer and its log. Time is counted from the end of the first, compiling, step."""

    def __init__(self, args: argparse.Namespace, model: Llama, held_out: tuple[Tensor, Tensor]) -> None:
        self.args, self.model, self.held_out = args, model, held_out
        self.device = device = held_out[0].device
        decayed = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        groups = [
            {"params": decayed, "weight_decay": args.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.forward = torch.compile(model) if args.compile else model
        self.curve: list[dict[str, float]] = []
        self.steps = self.tokens_seen = 0
        self.seconds = 0.0

    def run(self, batches: Batches) -> None:
        """Train for the budget; a log entry every fiftieth of it."""
        budget_s, step_tokens = self.args.minutes * 60, self.args.batch_tokens
        loss, next_entry, started = torch.zeros(()), 0.0, time.perf_counter()
        while (progress := self.seconds / budget_s) < 1.0:
            tokens = LONG_TOKENS if progress >= LONG_FROM_PROGRESS else SHORT_TOKENS
            self._set_learning_rate(progress)
            loss = self._step(batches.draw(max(1, step_tokens // tokens), tokens))
            self.steps += 1
            self.tokens_seen += max(1, step_tokens // tokens) * tokens
            if self.steps == 1:
                _synchronize(self.device)
                started = time.perf_counter()
            # Asking the device for its loss every step would stall it, so only the log entries do.
            if progress >= next_entry:
                self._log(float(loss))
                next_entry += 0.02
            elif self.steps % 10 == 0:
                _synchronize(self.device)
            self.seconds = time.perf_counter() - started
        self._log(float(loss))

    def evaluate(self) -> float:
        """Mean loss over fixed windows of the held-out stream, nats per token."""
        with torch.no_grad(), self._precision():
            inputs, targets = self.held_out
            return float(_loss(self.model(inputs), targets))

    def _step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        with self._precision():
            loss = _loss(self.forward(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _set_learning_rate(self, progress: float) -> None:
        warm = min(1.0, (self.steps + 1) / self.args.warmup_steps)
        rate = self.args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _log(self, loss: float) -> None:
        entry = {
            "step": self.steps,
            "tokens_seen": self.tokens_seen,
            "seconds": round(self.seconds, 2),
            "train_loss": round(loss, 4),
            "held_out_loss": round(self.evaluate(), 4),
        }
        self.curve.append(entry)
        print(json.dumps(entry), flush=True)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def sample(model: Llama, tokenizer_file: Path, device: torch.device) -> list[dict[str, str]]:
    """Greedy answers to a few prompts; empty where the `tokenizers` package is missing."""
    if importlib.util.find_spec("tokenizers") is None:
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").ids
        size = len(ids)
        while len(ids) - size < 120 and ids[-1] not in (END_OF_TEXT_ID, TURN_END_ID):
            with torch.no_grad():
                logits = model(torch.tensor([ids], device=device))
            ids.append(int(logits[0, -1].argmax()))
        answers.append({"prompt": prompt, "answer": tokenizer.decode(ids[size:])})
        print(f"> {prompt}\n{answers[-1]['answer']}\n", flush=True)
    return answers


def compare_with_transformers(model: Llama, folder: Path, stream: np.ndarray) -> float | None:
    """Largest logit difference from transformers' LlamaForCausalLM in float32; None where it is missing."""
    if importlib.util.find_spec("transformers") is None:
        return None
    # by name: a type checker that follows this import binds every model there is, half a minute
    transformers: Any = importlib.import_module("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    ids = torch.from_numpy((stream[:300] & ~np.uint16(NO_LOSS_BIT)).astype(np.int64))[None]
    ours = Llama(model.shape)
    ours.load_state_dict({name: value.cpu().bfloat16().float() for name, value in model.state_dict().items()})
    with torch.no_grad():
        return float((ours(ids) - theirs(ids).logits).abs().max())


def parse_arguments() -> argparse.Namespace:
    """The command line; defaults are the published model's."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--corpus", type=Path, default=Path(".quire/train/corpus.npz"))
    parser.add_argument("--tokenizer", type=Path, default=Path("deploy/models/quire-demo/tokenizer.json"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="training time without compilation; 0 = random"
    )
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--warmup-steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    shape = LlamaShape()
    model = Llama(shape).to(device)
    corpus = np.load(args.corpus)
    print(
        f"{model.num_parameters} parameters, {len(corpus['train'])} tokens in the corpus, {device}",
        flush=True,
    )
    held_out = Batches(corpus["held_out"], seed=args.seed, device=device).draw(16, SHORT_TOKENS)
    trainer = Trainer(args, model, held_out)
    if args.minutes > 0:
        trainer.run(Batches(corpus["train"], seed=args.seed, device=device))
    save_safetensors(model, args.out / "model.safetensors")
    config = shape.hf_config(end_ids=[TURN_END_ID, END_OF_TEXT_ID], pad_id=END_OF_TEXT_ID)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    difference = compare_with_transformers(model, args.out, corpus["held_out"])
    log = {
        "command": " ".join(["python -m deploy.models.train", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": args.seed,
        "parameters": model.num_parameters,
        "corpus_tokens": len(corpus["train"]),
        "steps": trainer.steps,
        "tokens_seen": trainer.tokens_seen,
        "seconds": round(trainer.seconds, 1),
        "logit_difference_from_transformers": difference,
        "curve": trainer.curve,
        "samples": sample(model, args.tokenizer, device),
    }
    (args.out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n", "utf-8")
    print(f"wrote {args.out}; largest logit difference from transformers: {difference}")


if __name__ == "__main__":
    main()
